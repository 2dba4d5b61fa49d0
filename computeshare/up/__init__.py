"""`computeshare up`: everything on this machine."""
