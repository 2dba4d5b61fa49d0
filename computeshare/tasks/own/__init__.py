"""Data sets that users add, as tasks read them."""
