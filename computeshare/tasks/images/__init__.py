"""Image classification: data sets, models and their inputs."""
