"""Nothing outside `computeshare.codecs` knows which codecs there are."""

import ast
from collections.abc import Sequence
from typing import get_args

import numpy as np
import pytest

from computeshare.codecs.registry import CANDIDATES, CODECS, PAIRS, CodecName
from computeshare.jobspec.spec import JobSpec
from computeshare.types import Precision
from tests.support.guards import offences, offences_outside

CLASSES = {type(codec).__name__ for codec in CODECS.values()}


def depends_on_a_codec(node: ast.AST) -> bool:
    """Whether code depends on a codec: its class, a list of codecs' names, or the codec looked up by its name."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) if name in CLASSES:
            return True
        case ast.Tuple(elts=parts) | ast.List(elts=parts) | ast.Set(elts=parts) | ast.Dict(keys=parts):
            named = {part.value for part in parts if isinstance(part, ast.Constant) and part.value in list(CODECS)}
            return len(named) > 1 and not named <= set(get_args(Precision))  # which have names in common with codecs
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


def test_no_module_outside_codecs_depends_on_a_codec() -> None:
    assert offences_outside("codecs", depends_on_a_codec) == {}


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
    assert offences(line, depends_on_a_codec)
    assert not offences(
        'spec = {"codec": {"up": "int8", "down": "int8"}}; vector.dtype == "float32"', depends_on_a_codec
    )


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
