"""Lua sources as their tokens, so that a change to one applies however its lines are laid out."""

import re

TOKEN = re.compile(
    r"""(?P<comment>--[^\n]*)
    | "(?:[^"\\]|\\.)*" | '(?:[^'\\]|\\.)*'
    | \d+(?:\.\d+)?(?:e-?\d+)? | \w+ | \.\.+ | [~=<>]= | \S""",
    re.VERBOSE,
)


def tokens(source: str) -> list[re.Match[str]]:
    """All but comments."""
    return [token for token in TOKEN.finditer(source) if token["comment"] is None]


def places(source: str, fragment: str) -> list[tuple[int, int]]:
    """Where the tokens of a fragment stand in a source: starts and ends."""
    among, wanted = tokens(source), [token[0] for token in tokens(fragment)]
    texts, size = [token[0] for token in among], len(wanted)
    found = (i for i in range(len(texts) - size + 1) if texts[i : i + size] == wanted)
    return [(among[i].start(), among[i + size - 1].end()) for i in found]
