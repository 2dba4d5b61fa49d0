"""Flat vectors: how a model's `state_dict` lies in them, and safetensors files."""
