"""Codecs: float32 vectors to bytes and back, and the messages made of them."""
