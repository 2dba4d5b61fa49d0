"""Health, figures for Prometheus, the connection to the broker."""
