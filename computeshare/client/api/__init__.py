"""The REST API from Python: a method for each call, and the models of its answers."""
