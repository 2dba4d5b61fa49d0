"""A seat that holds some stages of a model, as the leader of a chain of workers or as one of its followers."""
