"""A model's `state_dict` as flat vectors, and safetensors files."""
