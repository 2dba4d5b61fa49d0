"""Text from jobs' language models."""
