"""Recipes that users bring: their files, and trials of them."""
