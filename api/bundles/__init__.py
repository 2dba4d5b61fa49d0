"""Bundles of files, which clients upload and workers fetch."""
