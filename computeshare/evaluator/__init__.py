"""The evaluator: scores checkpoints."""
