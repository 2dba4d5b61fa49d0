"""Workers that hold the stages of a model together: who holds what, how they send each other values, what they read."""
