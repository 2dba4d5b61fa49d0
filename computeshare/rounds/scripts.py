"""The Lua scripts, registered once per connection."""

from collections.abc import Sequence
from importlib import resources
from typing import Any

from redis import Redis
from redis.client import Pipeline
from redis.exceptions import NoScriptError

Argument = str | bytes | int | float


class Scripts:
    """Calls `computeshare/lua/NAME.lua` by digest, alone or at the end of a pipeline."""

    def __init__(self, redis: Redis) -> None:
        self._redis = redis
        self._digests: dict[str, str] = {}

    def call(self, name: str, keys: Sequence[str], arguments: Sequence[Argument]) -> Any:
        """Run one script and return its reply."""
        try:
            return self._redis.evalsha(self._digest(name), len(keys), *keys, *arguments)
        except NoScriptError:  # the broker was restarted
            return self._redis.evalsha(self._load(name), len(keys), *keys, *arguments)

    def queue(self, pipeline: Pipeline, name: str, keys: Sequence[str], arguments: Sequence[Argument]) -> None:
        """Append one script to a pipeline; run the pipeline with `execute`."""
        pipeline.evalsha(self._digest(name), len(keys), *keys, *arguments)

    def execute(self, pipeline: Pipeline) -> list[Any]:
        """Run a pipeline whose commands may be repeated, loading the scripts again if the broker lost them."""
        commands = list(pipeline.command_stack)
        try:
            return list(pipeline.execute())
        except NoScriptError:
            for name in self._digests:
                self._load(name)
            pipeline.command_stack = commands
            return list(pipeline.execute())

    def _digest(self, name: str) -> str:
        return self._digests.get(name) or self._load(name)

    def _load(self, name: str) -> str:
        source = resources.files("computeshare.lua").joinpath(f"{name}.lua").read_text()
        self._digests[name] = str(self._redis.script_load(source))
        return self._digests[name]
