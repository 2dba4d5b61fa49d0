"""Shared by every process of ComputeShare: signals, logs, failpoints, durable files."""
