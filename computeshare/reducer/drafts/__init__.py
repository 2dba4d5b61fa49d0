"""Versions that are made and published bucket by bucket while their rounds are still open."""
