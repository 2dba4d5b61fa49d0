"""HTTP: translate, delegate, translate back."""
