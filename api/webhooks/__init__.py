"""Webhooks: signed notifications of jobs' events, posted to a user's addresses."""
