"""Alembic's migrations of the SQLite database."""
