"""Publishes jobs and delivers decisions from SQLite to the broker, within the limit of the broker's memory."""
