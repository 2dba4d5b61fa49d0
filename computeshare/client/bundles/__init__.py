"""Bundles between this machine and the control plane."""
