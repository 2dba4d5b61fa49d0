"""The worker: its process, its seats, the machine it is a guest on."""
