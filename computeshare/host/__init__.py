"""A worker as a guest on its owner's machine: when it rests, the machine's sleep, and service files."""
