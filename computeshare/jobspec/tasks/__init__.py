"""What a JobSpec says of the task that is trained, and what follows from it."""
