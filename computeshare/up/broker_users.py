"""The broker's users: a user for each role, with the commands and keys that the role needs. Pure.

    python -m computeshare.up.broker_users > broker-users.conf

prints the lines for the configuration of a broker of your own, with variables in the place of passwords.
"""

from collections.abc import Iterator, Mapping
from hashlib import sha256

from computeshare.protocol import keys
from computeshare.protocol.keys import JobKeys
from computeshare.settings import BrokerUser, derive

JOB = JobKeys("*")
COMMANDS = "+@all -@admin -@dangerous -@scripting +evalsha +script|load +sort +info"
"""Of every role: neither the server nor data of others' making can be changed, read out, or flushed as a whole."""
EVENTS = "spec fence events logs"
"""What `announce` and `log` name. A script needs the right to write each key that it names, if only to read it."""
LEASES = "leases backups audits copies disputes early received offers free full answers arrivals speeds suspects recent"
WRITES: Mapping[BrokerUser, str] = {
    "reducer": f"{EVENTS} {LEASES} round versions sessions banned strikes peers peer staged update weights delta news "
    "chain state steps draft drafts stages reducer backlog taken",
    "evaluator": f"{EVENTS} scoring score_requests score_answer",
    "worker": f"{EVENTS} {LEASES} round versions sessions banned seats kinds peers peer staged update news measured "
    "probe handed inner members placement mail scoring score_requests score_answer",
}
"""The keys of a job that each role may write, by their names in `JobKeys`. All of a job's keys may be read."""
BUNDLES = (keys.BUNDLE_WANTS, keys.BUNDLE_ASKED, keys.bundle_ready("*"))
GROUPS = (keys.group_peers("*"), keys.group_peer("*", "*"), keys.group_stage("*", "*"))
SHARED: Mapping[BrokerUser, tuple[str, ...]] = {
    "reducer": (keys.JOBS, keys.GIVEN_UP),
    "evaluator": (
        keys.JOBS,
        keys.EVALUATOR,
        keys.RECIPE_EVALUATOR,
        keys.TEXT_REQUESTS,
        keys.text_request("*"),
        keys.text_answer("*"),
    ),
    "worker": (keys.WORKERS, keys.worker("*"), *BUNDLES, *GROUPS, "rq:*"),
}
"""The other keys that each role may write."""
READS: Mapping[BrokerUser, tuple[str, ...]] = {
    "reducer": (keys.RELEASE,),
    "evaluator": (keys.RELEASE, keys.worker("*")),
    "worker": (keys.RELEASE, keys.orders("*"), keys.bundle_offers("*"), keys.bundle_piece("*")),
}
"""The keys beside jobs' that each role may read and not write."""
CHANNELS: Mapping[BrokerUser, tuple[str, ...]] = {"worker": ("rq:pubsub:*", JOB.here("*"))}


def password(secret: str, user: BrokerUser) -> str:
    """A user's password. The owner's is the secret itself; from another's, neither can be found."""
    return secret if user == "owner" else derive(secret, f"broker user {user}")


def config_lines(secret: str) -> list[str]:
    """The users as lines of a broker's configuration, with digests of their passwords; the default user is off."""
    return [*_lines({user: f"#{sha256(password(secret, user).encode()).hexdigest()}" for user in RULES})]


def _lines(passwords: Mapping[BrokerUser, str]) -> Iterator[str]:
    yield "user default off"
    for user, one in passwords.items():
        yield f"user {user} on {one} {RULES[user]}"


def _rules(user: BrokerUser) -> str:
    written = [*map(_pattern, WRITES[user].split()), *SHARED[user]]
    only_read = [keys.ROUNDS, *READS[user]]
    rules = [*(f"~{one}" for one in written), *(f"%R~{one}" for one in only_read)]
    return " ".join([*rules, *(f"&{one}" for one in CHANNELS.get(user, ())), COMMANDS])


def _pattern(name: str) -> str:
    method = getattr(JobKeys, name)
    return str(method(JOB, *"*" * (method.__code__.co_argcount - 1)))


RULES: Mapping[BrokerUser, str] = {
    "owner": "~* &* +@all",
    "api": f"~* &* {COMMANDS}",
    **{user: _rules(user) for user in WRITES},
}
"""Each user's rules. The owner's are for a person, and for commands that a person gives."""


if __name__ == "__main__":
    print("\n".join(_lines({user: f">${user.upper()}_PASSWORD" for user in RULES})))
