"""The versions of a job: their chain of differences, their ledger, and their events in the broker."""
