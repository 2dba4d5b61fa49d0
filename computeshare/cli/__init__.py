"""The commands of `computeshare`, a module for each noun. Importing this package imports nothing."""
