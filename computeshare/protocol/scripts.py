"""Loads and calls the Lua scripts; keys and arguments are passed by the names that a script's source declares."""

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from itertools import chain
from typing import Any, NamedTuple

from redis import Redis
from redis.exceptions import NoScriptError

from computeshare.protocol.keys import JobKeys
from computeshare.transport.commands import Argument, Command

VALUE = r"tonumber\(ARGV\[\d+\]\)|(?:KEYS|ARGV)\[\d+\]|slice\((?:KEYS|ARGV), \d+(?:, \d+)?\)"
DECLARATION = re.compile(rf"\s*local\s+(\w+(?:,\s*\w+)*)\s*=\s*((?:{VALUE})(?:,\s*(?:{VALUE}))*)\s*(?=\n|$)")
COMMENT = re.compile(r"--.*")
SHARED_FUNCTION = re.compile(r"local function (\w+)")


class Names(NamedTuple):
    """The names of a script's KEYS, or of its ARGV, in order."""

    single: tuple[str, ...]
    rows: tuple[str, ...]
    """Names of lists that follow `single`, interleaved: the first value of each list, the second of each, and so on."""

    def order(self, values: Mapping[str, Any]) -> list[Any]:
        """The values in the order of the script's KEYS or ARGV."""
        ordered = [*map(values.__getitem__, self.single)]
        if self.rows:
            ordered += chain.from_iterable(zip(*(values.get(name, ()) for name in self.rows), strict=True))
        return ordered


class Script:
    """One script. Its source declares its keys and arguments at the top:

        local round_key, weights_key = KEYS[1], KEYS[2]
        local token, at_least = ARGV[1], tonumber(ARGV[2])
        local micro_batches, losses = slice(ARGV, 3, 2), slice(ARGV, 4, 2) -- every second value from there on

    `round_key` is the job's `JobKeys.round()`; a key with parameters, as `JobKeys.weights`, is the caller's to give.
    """

    def __init__(self, name: str, source: str) -> None:
        """Raises ValueError: an index of KEYS or ARGV has no name, or several."""
        self.name, self.source = name, source
        declared = [*_declared(source)]
        self.keys, self.arguments = (_names(name, declared, where) for where in ("KEYS", "ARGV"))
        self.of_job = tuple(filter(_is_of_job, self.keys.single))
        self.required = frozenset({*self.keys.single, *self.arguments.single} - {*self.of_job})
        self.known = self.required.union(self.keys.rows, self.arguments.rows)

    def inputs(self, job: JobKeys, values: dict[str, Any]) -> list[Argument]:
        """The arguments of EVALSHA after the digest: the number of keys, the keys, the arguments.

        Raises TypeError: a name is missing, or the script does not know it.
        """
        given = values.keys()
        if not self.required <= given <= self.known:
            raise TypeError(self._complaint(given))
        keys = self.keys.order({**_keys_of(job, self.of_job), **values})
        return [len(keys), *keys, *self.arguments.order(values)]

    def _complaint(self, given: Iterable[str]) -> str:
        missing, unknown = sorted(self.required.difference(given)), sorted({*given} - self.known)
        lacks = [f"lacks {', '.join(missing)}"] if missing else []
        lacks += [f"does not take {', '.join(unknown)}"] if unknown else []
        return f"the script {self.name} {' and '.join(lacks)}"


class Scripts:
    """Calls scripts by their digests over redis-py's connections, from any thread."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._digests: dict[str, str] = {}

    def call(self, name: str, job: JobKeys, **values: Any) -> Any:
        """Run one script and return its reply. `values`: its keys and arguments, see `Script`."""
        inputs: list[Any] = script(name).inputs(job, values)
        try:
            return self._redis.evalsha(self.digest(name), *inputs)
        except NoScriptError:  # the broker was restarted
            return self._redis.evalsha(self._load(name), *inputs)

    def command(self, name: str, job: JobKeys, **values: Any) -> Command:
        """The EVALSHA command for a script."""
        return ["EVALSHA", self.digest(name), *script(name).inputs(job, values)]

    def digest(self, name: str) -> str:
        return self._digests.get(name) or self._load(name)

    def load_again(self) -> None:
        """Load every script used so far again, after a restart of the broker."""
        for name in list(self._digests):
            self._load(name)

    def _load(self, name: str) -> str:
        self._digests[name] = str(self._redis.script_load(script(name).source))
        return self._digests[name]


@functools.cache
def script(name: str) -> Script:
    """The script `lua/NAME.lua`, preceded by `lua/shared.lua` if it calls a function of that file."""
    shared, own = (
        resources.files("computeshare.protocol.lua").joinpath(f"{file}.lua").read_text() for file in ("shared", name)
    )
    called = any(re.search(rf"\b{function}\(", own) for function in SHARED_FUNCTION.findall(shared))
    return Script(name, f"{shared}\n{own}" if called else own)


def _declared(source: str) -> Iterator[tuple[str, str]]:
    """Each name that a source declares at its top (after shared functions), with the Lua expression of its value."""
    code = COMMENT.sub("", source)
    start = DECLARATION.search(code)
    place = start.start() if start else len(code)
    while declaration := DECLARATION.match(code, place):
        yield from zip(re.split(r",\s*", declaration[1]), re.findall(VALUE, declaration[2]), strict=True)
        place = declaration.end()


def _names(script: str, declared: Iterable[tuple[str, str]], where: str) -> Names:
    single: dict[int, str] = {}
    rows: dict[int, str] = {}
    steps: set[int] = set()
    for name, value in declared:
        if where not in value:
            continue
        place, *step = map(int, re.findall(r"\d+", value))
        among = rows if value.startswith("slice") else single
        if place in among:
            raise ValueError(f"the script {script} calls {where}[{place}] both {among[place]} and {name}")
        among[place] = name
        steps |= {*(step or [1])} if among is rows else set()
    places = [*sorted(single), *sorted(rows)]
    if places != [*range(1, len(places) + 1)] or steps - {len(rows)}:
        raise ValueError(f"the script {script} does not name each of its {where} once")
    return Names(*(tuple(among[place] for place in sorted(among)) for among in (single, rows)))


@functools.lru_cache(maxsize=1024)
def _keys_of(job: JobKeys, names: tuple[str, ...]) -> dict[str, str]:
    return {name: getattr(job, name.removesuffix("_key"))() for name in names}


def _is_of_job(key: str) -> bool:
    """Whether the job alone determines a key."""
    method = getattr(JobKeys, key.removesuffix("_key"), None)
    return key.endswith("_key") and method is not None and method.__code__.co_argcount == 1
