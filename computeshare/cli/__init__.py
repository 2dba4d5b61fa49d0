"""The commands of `computeshare`, one module a noun. Importing this package imports nothing."""
