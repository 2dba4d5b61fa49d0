"""Data sets that users add, prepared once into memory-mapped files. Imports no torch."""
