"""Projects the broker's events into rows of SQLite."""
