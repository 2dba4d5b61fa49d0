"""Checkpoints: versions of a job on disk."""
