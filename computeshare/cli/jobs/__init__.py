"""`computeshare jobs`: one module a command."""
