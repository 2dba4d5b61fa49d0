"""A seat in a job with a delay: it computes while earlier updates and the next version are on their way."""
