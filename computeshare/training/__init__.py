"""The torch side: models, data sets, devices, forward and backward. Importing this package imports no torch."""
