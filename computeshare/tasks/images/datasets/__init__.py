"""Data sets of images by name, as memory-mapped files."""
