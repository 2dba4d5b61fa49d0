"""A seat: a worker's participation in one job, in a process of its own."""
