"""The broker's users: a user for each role, with the commands and keys that it needs. Pure.

    python -m computeshare.up.broker_users >> broker.conf

prints their lines for the configuration of a broker of your own, with new passwords, and the address of each. With
`--variables`, names stand for the passwords, and the owner is left out: so the containers have them.
"""

import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256

from computeshare.protocol import keys
from computeshare.protocol.keys import JobKeys
from computeshare.queue.rq_keys import SUSPENDED, WORKERS, RqKeys, RqSeatKeys
from computeshare.settings import BrokerUser, derive
from computeshare.types import ID_LENGTH

JOB, RQ, SEAT = JobKeys("?" * ID_LENGTH), RqKeys("*"), RqSeatKeys("*")
"""A `*` for a job's id would cost a script a fifth of its time: the broker compares each key with one pattern after the
other, and looks for what follows a `*` at each place of the key.
"""
COMMANDS = "+@all -@admin -@dangerous -@scripting +evalsha +script|load +info"
"""Of every role. None can administer the broker, see its clients, run a script by its text, or flush everything."""
UNITS = (
    *(JOB.leases(), JOB.backups(), JOB.audits(), JOB.copies(), JOB.disputes(), JOB.suspects()),
    *(JOB.offers(), JOB.early_offers(), JOB.received(), JOB.early(), JOB.answers(), JOB.arrivals(), JOB.speeds()),
    *(JOB.recent(), JOB.full(), JOB.free(), JOB.staged("*"), JOB.update("*", "*")),
)
"""Leases, and what is sent for them. A script needs the right to write each key that its caller names."""
ROUND = (JOB.round(), JOB.versions(), JOB.events(), JOB.logs(), JOB.sessions(), JOB.peers(), JOB.peer("*"))
WEIGHTS = (JOB.weights("*"), JOB.delta("*"), JOB.news("*"), JOB.chain(), JOB.draft("*"), JOB.drafts())
STATE = (JOB.state("*"), JOB.steps(), JOB.stages(), JOB.reducer(), JOB.fence(), JOB.backlog(), JOB.taken())
BUNDLES = (keys.BUNDLE_WANTS, keys.BUNDLE_ASKED, keys.bundle_ready("*"))
GROUPS = (keys.group_peers("*"), keys.group_peer("*", "*"), keys.group_stage("*", "*"))
QUEUES = (
    *(RQ.queue(), *RQ.registries(), RQ.worker(), RQ.workers(), WORKERS),
    *(SEAT.job(), SEAT.dependencies(), SEAT.results(), SEAT.executions(), SEAT.execution("*")),
)
WRITES: Mapping[BrokerUser, tuple[str, ...]] = {
    "reducer": (
        *(*ROUND, *UNITS, *WEIGHTS, *STATE, JOB.spec(), JOB.banned(), JOB.strikes()),
        *(keys.JOBS, keys.GIVEN_UP),
    ),
    "evaluator": (
        *(JOB.events(), JOB.logs(), JOB.scoring("*"), keys.JOBS, keys.EVALUATOR, keys.RECIPE_EVALUATOR),
        *(keys.TEXT_REQUESTS, keys.text_request("*"), keys.text_answer("*")),
    ),
    "worker": (
        *(*ROUND, *UNITS, JOB.kinds(), JOB.measured("*"), JOB.probe("*"), JOB.handed(), JOB.inner("*")),
        *(JOB.members(), JOB.placement(), JOB.mail("*"), JOB.score_requests("*"), JOB.score_answer("*")),
        *(keys.WORKERS, keys.worker("*"), *BUNDLES, *GROUPS, *QUEUES),
    ),
}
"""The keys that each role may write, as patterns. Of jobs it may read all."""
READS: Mapping[BrokerUser, tuple[str, ...]] = {
    "reducer": (keys.RELEASE,),
    "evaluator": (keys.RELEASE,),
    "worker": (keys.RELEASE, keys.orders("*"), keys.bundle_offers("*"), keys.bundle_piece("*"), SUSPENDED),
}
"""The keys beside jobs' that each role may read and not write."""
MORE: Mapping[BrokerUser, tuple[str, ...]] = {
    "evaluator": ("-scan", "-randomkey"),
    "worker": ("-scan", "-randomkey", f"&{RQ.channel()}", f"&{JOB.here('*')}"),
}
"""Further rules: commands, and channels."""


def password(secret: str, user: BrokerUser) -> str:
    """A user's password: the owner's is the secret. From a role's, neither the secret nor another role's follows."""
    return secret if user == "owner" else derive(secret, f"broker user {user}")


def config_lines(secret: str) -> list[str]:
    """The users as lines of a broker's configuration, with digests of their passwords; the default user is off."""
    return [*_lines(lambda user: f"#{sha256(password(secret, user).encode()).hexdigest()}")]


def _lines(password_of: Callable[[BrokerUser], str]) -> Iterator[str]:
    yield "user default off"
    for user, rules in RULES.items():
        yield f"user {user} on {password_of(user)} {rules}"


def _rules(user: BrokerUser) -> str:
    written, read = (f"~{one}" for one in WRITES[user]), (f"%R~{one}" for one in (keys.ROUNDS, *READS[user]))
    return " ".join([*written, *read, COMMANDS, *MORE.get(user, ())])


RULES: Mapping[BrokerUser, str] = {
    "owner": "~* &* +@all",
    "api": f"~* &* {COMMANDS}",
    **{user: _rules(user) for user in WRITES},
}
"""Each user's rules. The owner's are for a person, and for commands that a person gives."""


def main(arguments: list[str]) -> None:
    """Print the lines."""
    if arguments == ["--variables"]:
        lines = _lines(lambda user: f">${user.upper()}_PASSWORD")
        print("\n".join(line for line in lines if not line.startswith("user owner ")))
        return
    words = {user: secrets.token_hex(24) for user in RULES}
    for user, word in words.items():
        print(f"# {user}: redis://{user}:{word}@HOST:6379/0")
    print("\n".join(_lines(lambda user: f">{words[user]}")))


if __name__ == "__main__":
    main(sys.argv[1:])
