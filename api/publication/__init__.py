"""What the broker is told of, in order, as far as its memory goes."""
