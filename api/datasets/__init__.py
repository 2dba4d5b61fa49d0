"""Data sets that users added."""
