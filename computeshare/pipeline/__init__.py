"""A model whose layers are spread over workers: how it is split, what a worker computes of it, and who holds what."""
