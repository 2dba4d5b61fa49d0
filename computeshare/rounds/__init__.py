"""The round protocol over Redis: lease, submit, gather, commit. Every atomic step is a script in `computeshare/lua`."""

from computeshare.rounds.channel import Scripts
from computeshare.rounds.claim import Claim, Fault, Link, Received, Suspicion
from computeshare.rounds.member import Grant, Member, Pulled, Receipt, Update, Waiting
from computeshare.rounds.store import RoundState, RoundStore, published_jobs
from computeshare.rounds.terms import Terms

__all__ = [
    "Claim",
    "Fault",
    "Grant",
    "Link",
    "Member",
    "Pulled",
    "Receipt",
    "Received",
    "RoundState",
    "RoundStore",
    "Scripts",
    "Suspicion",
    "Terms",
    "Update",
    "Waiting",
    "published_jobs",
]
