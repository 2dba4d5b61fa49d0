"""ComputeShare: train a PyTorch model on the machines you already own."""

__version__ = "0.1.0"
