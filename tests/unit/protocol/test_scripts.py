"""What a script takes is what its source declares at its top."""

import re
from importlib import resources

import pytest

from computeshare.protocol import limits
from computeshare.protocol.keys import JobKeys
from computeshare.protocol.scripts import COMMENT, Script, script

JOB = JobKeys("abcd1234")
SOURCE = """
-- example.lua: an example.
local round_key, weights_key = KEYS[1], KEYS[2] -- weights: of the next version
local staged_keys, update_keys = slice(KEYS, 3, 2),
  slice(KEYS, 4, 2)
local token, at_least = ARGV[1], tonumber(ARGV[2])
local micro_batches = slice(ARGV, 3)

local other = redis.call("GET", round_key)
return other
"""
EXAMPLE = Script("example", SOURCE)
NAMES = sorted(file.name.removesuffix(".lua") for file in resources.files("computeshare.protocol.lua").iterdir())
SCRIPTS = [name for name in NAMES if name not in ("shared", "__init__.py", "__pycache__")]


def test_names_are_those_that_the_source_declares() -> None:
    assert (EXAMPLE.keys.single, EXAMPLE.keys.rows) == (("round_key", "weights_key"), ("staged_keys", "update_keys"))
    assert (EXAMPLE.arguments.single, EXAMPLE.arguments.rows) == (("token", "at_least"), ("micro_batches",))


def test_values_come_in_the_order_of_the_script_whatever_that_of_the_caller() -> None:
    values = {"at_least": 3, "micro_batches": [7, 8, 9], "token": "t", "weights_key": "w"}
    keys = {"update_keys": ["u7", "u8"], "staged_keys": ["s7", "s8"]}
    assert EXAMPLE.inputs(JOB, values | keys) == [6, JOB.round(), "w", "s7", "u7", "s8", "u8", "t", 3, 7, 8, 9]


def test_lists_may_be_left_out() -> None:
    values = {"token": "t", "at_least": 3, "weights_key": "w"}
    assert EXAMPLE.inputs(JOB, values) == [2, JOB.round(), "w", "t", 3]


def test_lists_that_go_together_are_of_one_length() -> None:
    values = {"token": "t", "at_least": 3, "weights_key": "w", "staged_keys": ["s7"]}
    with pytest.raises(ValueError, match="shorter"):
        EXAMPLE.inputs(JOB, values)


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"token": "t"}, "the script example lacks at_least, weights_key"),
        ({"token": "t", "at_least": 3, "weights_key": "w", "worker": 1}, "the script example does not take worker"),
        (
            {"token": "t", "at_most": 3, "weights_key": "w"},
            "the script example lacks at_least and does not take at_most",
        ),
        (
            {"token": "t", "at_least": 3, "weights_key": "w", "round_key": "r"},
            "the script example does not take round_key",
        ),
    ],
)
def test_names_that_are_missing_or_unknown_are_told(values: dict[str, object], complaint: str) -> None:
    with pytest.raises(TypeError, match=f"^{complaint}$"):
        EXAMPLE.inputs(JOB, values)


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("local a, b = KEYS[1], KEYS[3]", "does not name each of its KEYS once"),
        ("local a, b = ARGV[1], ARGV[1]", r"calls ARGV\[1\] both a and b"),
        ("local a, b = ARGV[1], slice(ARGV, 3)", "does not name each of its ARGV once"),
        ("local a, b = slice(ARGV, 1, 2), slice(ARGV, 2, 3)", "does not name each of its ARGV once"),
    ],
)
def test_a_source_names_each_place_once(source: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Script("example", source)


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_speaks_of_positions_in_its_declarations_only(name: str) -> None:
    one = script(name)
    names = [*one.keys.single, *one.keys.rows, *one.arguments.single, *one.arguments.rows]
    positions = re.findall(r"\b(?:KEYS|ARGV)\b", COMMENT.sub("", one.source))
    assert len(SCRIPTS) > 20 and len({*names}) == len(names) == len(positions)
    assert all(key.endswith(("_key", "_keys")) for key in [*one.keys.single, *one.keys.rows])


def test_shared_functions_stand_before_a_script_that_calls_one() -> None:
    assert script("join").source.count("local function free_leases(") == 1
    assert "local function" not in script("renew").source


def test_scripts_and_readers_have_the_same_limits() -> None:
    names, event = re.search(r"LONGEST_NAME, LONGEST_EVENT = (\d+), (\d+)", script("submit").source).groups()  # type: ignore[union-attr]
    assert (int(names), int(event)) == (limits.NAME_CHARACTERS, limits.WORKER_EVENT_BYTES)
    assert f"LONGEST_LINE = {limits.LINE_BYTES} " in script("log").source
