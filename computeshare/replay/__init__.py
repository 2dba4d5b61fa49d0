"""Recomputing a job from its log."""
