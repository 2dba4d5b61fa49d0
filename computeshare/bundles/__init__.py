"""Bundles: sets of files named by a digest, and their way from one machine to another."""
