"""The control plane: REST, pages, and the only writer of the SQLite database."""
