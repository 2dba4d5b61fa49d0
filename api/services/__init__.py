"""What the control plane does, apart from HTTP."""
