"""From the broker's events to the rows of SQLite."""
