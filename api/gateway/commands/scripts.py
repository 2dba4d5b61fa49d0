"""The scripts that a machine may call, and the form of their keys and arguments. Pure.

A script writes the round, whoever calls it: its keys must be exactly those of one job that the arguments imply.
"""

import functools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha1
from typing import Any

from api.gateway.commands.policy import FORMS, JOB, CommandNeeds, needs_of, pattern
from computeshare.protocol.keys import JobKeys
from computeshare.protocol.round_store import LINE_BYTES_KEPT, LINES_KEPT
from computeshare.protocol.scripts import Names, Script, script
from computeshare.protocol.worker_session import EXTENDED_MS, STAGED_S
from computeshare.runtime.log_lines import AT_ONCE

SESSION = {"worker": "<worker>", "session": "<hex>"}
ARGUMENTS: Mapping[str, Mapping[str, str]] = {
    "join": {**SESSION, "seat": "<seat>", "event": "<said>", "frozen": "<digest-or-none>"},
    "lease": {**SESSION, "token": "<token-or-none>", "and_news": "<flag>", "devices": "<devices>"},
    "extend": {**SESSION, "least_ms": str(EXTENDED_MS), "staged_s": str(STAGED_S), "micro_batches": "<unit>"},
    "submit": {
        **SESSION,
        "token": "<token>",
        "nonce": "<hex>",
        "event": "<short>",
        "parts": "<unit>",
        "micro_batches": "<unit>",
        "losses": "<loss>",
    },
    "offer": {**SESSION, "token": "<token>", "nonce": "<hex>", "micro_batch": "<unit>", "parts": "<part>"},
    "doubt": {**SESSION, "token": "<token>", "again": "<flag>"},
    "leave": {**SESSION, "session": "<hex-or-newest>", "event": "<said>"},
    "announce": {"fence": "", "kind": "<leaving>", "event": "<said>"},
    "log": {"kept": str(LINES_KEPT), "kept_bytes": str(LINE_BYTES_KEPT), "lines": "<short>"},
}
"""For each script that workers call, the form of each argument, or of each element of a list."""
REPORT_BYTES, REPORT_UNIT_BYTES = 2048, 16
"""The most bytes of what a worker says of a submission, and beyond that of each of its units: the event names them."""
MOST_LINES = AT_ONCE + 1
"""The most log lines of one call."""
MORE_FORMS = {
    "digest-or-none": r"(?:sha256:)?[0-9a-f]{64}|",
    "token-or-none": rf"{FORMS['token']}|",
    "flag": r"[01]",
    "devices": r"[1-9][0-9]?",
    "unit": r"0|[1-9][0-9]{0,14}",
    "loss": r"[-+.0-9a-z]{1,32}",
    "hex-or-newest": rf"{FORMS['hex']}|\*",
    "leaving": r"left|unfit",
    "said": r"[\s\S]{0,4096}",
}
Values = Mapping[str, Any]
IMPLIED: Mapping[str, Callable[[JobKeys, Values], str | list[str]]] = {
    "peer_key": lambda job, values: job.peer(values["worker"]),
    "update_keys": lambda job, values: [job.update(values["token"], one) for one in values["micro_batches"]],
    "staged_keys": lambda job, values: [
        job.staged(f"{values['worker']}:{values['nonce']}:{one}") for one in values["micro_batches"]
    ],
}
"""The keys that follow from a call's arguments."""


class NotPermitted(Exception):
    """Why a machine may not make a call."""


def needs_of_load(source: bytes) -> CommandNeeds:
    """The needs of a command that loads a script. Raises NotPermitted."""
    if source.decode(errors="replace") not in (found.source for found in _by_digest().values()):
        raise NotPermitted("machines may load no other scripts than a worker's")
    return CommandNeeds()


def needs_of_call(arguments: Sequence[bytes]) -> CommandNeeds:
    """The needs of an EVALSHA with these arguments. Raises NotPermitted."""
    called = _by_digest().get(arguments[1].decode(errors="replace").lower()) if len(arguments) > 3 else None
    if called is None:
        raise NotPermitted("machines may call no other scripts than a worker's")
    try:
        count = int(arguments[2])
        keys = [each.decode() for each in arguments[3 : 3 + count]]
        given = _named(called.arguments, [each.decode() for each in arguments[3 + count :]])
        if count < len(called.keys.single) or len(keys) != count:
            raise ValueError
        needs = _checked_arguments(called, given)
        job = _job_of(called, keys)
    except ValueError as error:
        raise NotPermitted(f"the arguments of {called.name} have another form") from error
    workers = _checked_keys(called, JobKeys(job), keys, given) | _speakers(called.name, given) | needs.workers
    if not workers:
        raise NotPermitted(f"{called.name} names no worker")
    return CommandNeeds(workers, frozenset({job, *needs.jobs}))


def name_of(arguments: Sequence[bytes]) -> str:
    """The script that a permitted command calls; empty: it calls none."""
    return _by_digest()[arguments[1].decode().lower()].name if arguments[0].upper() == b"EVALSHA" else ""


def _named(names: Names, given: Sequence[str]) -> dict[str, Any]:
    """Values by their names in a script: texts, then lists. Raises ValueError."""
    single: dict[str, Any] = dict(zip(names.single, given, strict=False))
    return single | _rows(names.rows, given[len(names.single) :])


def _rows(names: Sequence[str], given: Sequence[str]) -> dict[str, Any]:
    if given and (not names or len(given) % len(names)):
        raise ValueError
    return {name: list(given[place :: len(names)]) for place, name in enumerate(names)}


def _checked_arguments(called: Script, given: Values) -> CommandNeeds:
    """The needs that follow from a call's arguments. Raises ValueError: the arguments have another form."""
    forms = ARGUMENTS[called.name]
    flat = [
        (forms[name], one) for name, value in given.items() for one in ([value] if isinstance(value, str) else value)
    ]
    units = given.get("micro_batches", ())
    if len(given) != len(forms) or len({*units}) < len(units):
        raise ValueError
    if called.name == "submit" and len(given["event"].encode()) > REPORT_BYTES + REPORT_UNIT_BYTES * len(units):
        raise NotPermitted(f"what a worker says of a submission has at most {REPORT_BYTES} bytes beside its units")
    needs = needs_of((_form(form) for form, _ in flat), (one.encode() for _, one in flat))
    if needs is None:
        raise ValueError
    return needs


def _job_of(called: Script, keys: Sequence[str]) -> str:
    """The job whose keys a call names first. Raises ValueError."""
    match = pattern(getattr(JOB, called.keys.single[0].removesuffix("_key"))()).fullmatch(keys[0].encode())
    if match is None:
        raise ValueError
    return match["job"].decode()


def _checked_keys(called: Script, job: JobKeys, keys: Sequence[str], given: Values) -> frozenset[str]:
    """The workers that a call's keys name. Raises NotPermitted: the keys do not follow from the arguments."""
    named = _named(called.keys, keys)
    workers: set[str] = set()
    for name, found in named.items():
        if name in called.of_job:
            right: Any = getattr(job, name.removesuffix("_key"))()
        elif name == "staged_keys" and "nonce" not in given:  # any of the worker's own
            forms = pattern(job.staged("<staged>"))
            needs = needs_of([forms] * len(found), [one.encode() for one in found])
            right, workers = (found, workers | needs.workers) if needs else (None, workers)
        else:
            right = IMPLIED[name](job, given)
        if found != right:
            raise NotPermitted(f"{called.name} names a key that is not this worker's")
    return frozenset(workers)


def _speakers(name: str, given: Values) -> frozenset[str]:
    """The workers that speak, in a call whose arguments are JSON with the speaker in it. Raises NotPermitted."""
    texts = given["lines"] if name == "log" else [given["event"]] if name == "announce" else []
    if len(texts) > MOST_LINES:
        raise NotPermitted(f"a worker sends at most {MOST_LINES} log lines at once")
    return frozenset(_speaker(text) for text in texts)


def _speaker(text: str) -> str:
    try:
        worker = json.loads(text, object_pairs_hook=_without_repeats)["worker"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise NotPermitted("what a worker says is a JSON object that names the worker") from error
    if not isinstance(worker, str):
        raise NotPermitted("what a worker says names the worker")
    return worker


def _without_repeats(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name is repeated")
    return found


@functools.cache
def _form(word: str) -> re.Pattern[bytes]:
    name = word.removeprefix("<").removesuffix(">")
    return re.compile(MORE_FORMS[name].encode()) if name in MORE_FORMS else pattern(word)


@functools.cache
def _by_digest() -> dict[str, Script]:
    """The scripts of `ARGUMENTS` by the digests under which the broker knows them."""
    sources = {name: script(name).source.encode() for name in ARGUMENTS}
    return {sha1(source, usedforsecurity=False).hexdigest(): script(name) for name, source in sources.items()}
