"""Runs code that the machine's owner did not write: in a process that reaches little of the machine."""
