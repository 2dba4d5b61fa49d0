"""What is trained: data sets, models, loss and metrics. Importing this package imports no torch."""
