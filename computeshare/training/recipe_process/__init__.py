"""A recipe's model and data in a process of their own, and the side that asks it and does not trust it."""
