"""The round protocol over Redis: lease, submit, gather, commit. Every atomic step is a script in `lua/`."""
