"""The reducer: averages updates and commits versions."""
