"""The worker: its process, its seats, and its consideration for the machine's owner."""
