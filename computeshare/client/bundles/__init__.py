"""Bundles, and data sets made of them, between this machine and the control plane."""
