"""HTTP middleware and the server: authentication, rate and size limits, errors, compression, metrics."""
