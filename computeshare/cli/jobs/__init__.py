"""`computeshare jobs`: a module for each longer command."""
