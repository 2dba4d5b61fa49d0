"""Assigns seats to workers: one level-triggered loop and its decisions."""
