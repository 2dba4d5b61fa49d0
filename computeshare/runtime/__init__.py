"""What every process of ComputeShare needs: signals, logs, failpoints."""
