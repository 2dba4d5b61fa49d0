"""HTTP itself: who may ask, how often, how much; compression, the server."""
