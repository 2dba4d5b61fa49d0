"""A seat that computes while earlier updates and the next version are on their way: with a delay, and of a peer."""
