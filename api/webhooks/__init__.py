"""Notifications to addresses of a user's own."""
