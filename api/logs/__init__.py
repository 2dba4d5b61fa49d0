"""The logs of jobs: collected from the broker, read, thinned."""
