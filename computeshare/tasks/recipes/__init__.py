"""Recipes: models, data and losses that users bring as plain PyTorch in Python files."""
