"""Peers: workers with weights of their own, which they average in pairs."""
