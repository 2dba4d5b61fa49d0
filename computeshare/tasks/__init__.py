"""Training tasks: data sets, models, loss and metrics. Importing this package does not import torch."""
