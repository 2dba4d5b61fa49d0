"""A model's forward pass as a graph: traced, surveyed, and cut into stages."""
