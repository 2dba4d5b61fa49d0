"""Nothing outside `computeshare.codecs` knows which codecs there are."""

import ast
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from computeshare.codecs.registry import CANDIDATES, CODECS, PAIRS, CodecName
from computeshare.jobspec.spec import JobSpec

ROOT = Path(__file__).resolve().parents[3]
OWN = ROOT / "computeshare" / "codecs"
CLASSES = {type(codec).__name__ for codec in CODECS.values()}


def offences(source: str) -> list[str]:
    """What in a module depends on a codec: its class, a list of codecs' names, or the codec looked up by its name."""
    return [ast.unparse(node) for node in ast.walk(ast.parse(source)) if depends_on_a_codec(node)]


def depends_on_a_codec(node: ast.AST) -> bool:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) if name in CLASSES:
            return True
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts) | ast.Dict(keys=parts):
            return sum(map(names_a_codec, parts)) > 1
        case ast.Subscript(value=ast.Name(id="CODECS"), slice=ast.Constant()):
            return True
        case ast.Compare(left=left, comparators=others):
            return any(asks_for_a_codec(part) for part in (left, *others)) and any(map(names_a_codec, (left, *others)))
    return False


def names_a_codec(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and node.value in list(CODECS)


def asks_for_a_codec(node: ast.AST) -> bool:
    """Whether an expression is `up`, `down`, `codec` or an attribute of such a name."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.Subscript(slice=ast.Constant(value=name)):
            return name in ("up", "down", "codec", "name")
    return False


def modules() -> Iterator[Path]:
    for package in ("api", "bench", "computeshare"):
        yield from (path for path in (ROOT / package).rglob("*.py") if OWN not in path.parents)


def test_no_module_outside_codecs_depends_on_a_codec() -> None:
    found = {str(path.relative_to(ROOT)): offences(path.read_text()) for path in modules()}
    assert len(found) > 200 and {path: lines for path, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    "line",
    [
        "from computeshare.codecs.topk import TopK",
        "isinstance(codec, int8.Int8)",
        'Codec = Literal["float32", "int8"]',
        'LOSSY = {"int8", "topk"}',
        'BYTES = {"float32": 4, "float16": 2}',
        'whole = CODECS["float32"]',
        'spec.codecs.down != "float32"',
        'codec["up"] == "topk"',
    ],
)
def test_a_line_that_depends_on_a_codec_is_found(line: str) -> None:
    assert offences(line)
    assert not offences('spec = {"codec": {"up": "int8", "down": "int8"}}; vector.dtype == "float32"')


def test_the_specification_offers_every_codec_both_ways() -> None:
    offered = JobSpec.model_json_schema()["$defs"]["CodecSpec"]["properties"]
    assert offered["up"]["enum"] == offered["down"]["enum"] == list(CODECS) == list(get_args(CodecName))


def test_the_automatic_choice_is_among_pairs_of_known_codecs_that_get_shorter() -> None:
    sizes: Sequence[list[int]] = [[list(CODECS).index(name) for name in pair] for pair in PAIRS]
    assert sizes == sorted(sizes) and set(CANDIDATES) == {name for pair in PAIRS for name in pair}


@pytest.mark.parametrize("name", CODECS)
def test_the_estimate_of_memory_holds_for_an_incompressible_vector(name: str) -> None:
    values = np.random.default_rng(1).normal(size=100_000).astype(np.float32)
    assert len(CODECS[name].encode(values, compress=False)) <= CODECS[name].bytes_per_value * values.size + 1000
