"""Several devices of one worker: each computes whole units with a copy of the module."""
