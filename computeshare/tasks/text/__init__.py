"""Texts and language models."""
