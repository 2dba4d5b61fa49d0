"""Scoring seats: workers that score checkpoints beside, or in place of, the evaluator."""
