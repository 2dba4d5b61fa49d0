"""Nothing outside `computeshare.strategies` knows which kinds of strategies there are."""

import ast

import pytest

from computeshare.jobspec.spec import JobSpec
from computeshare.strategies.registry import KINDS, parse_strategy, stored
from tests.support.guards import offences, offences_outside

CLASSES = {one.__name__ for one in KINDS.values()}


def depends_on_a_kind(node: ast.AST) -> bool:
    """Whether code depends on a kind: a class of one, a comparison with one, or of a strategy's kind."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name) | ast.alias(name=name) if name in CLASSES:
            return True
        case ast.Compare(left=left, comparators=others):
            return any(names_a_kind(part) for side in (left, *others) for part in ast.walk(side))
        case ast.match_case(pattern=pattern):
            return any(names_a_kind(part) for part in ast.walk(pattern))
    return False


def names_a_kind(node: ast.AST) -> bool:
    match node:
        case ast.Constant(value=value):
            return value in list(KINDS)
        case ast.Attribute(value=ast.Name(id="strategy") | ast.Attribute(attr="strategy"), attr="kind"):
            return True
    return False


def test_no_module_outside_strategies_depends_on_a_kind() -> None:
    assert offences_outside("strategies", depends_on_a_kind) == {}


@pytest.mark.parametrize(
    "line",
    [
        "isinstance(strategy, LocalStrategy)",
        "isinstance(strategy, local.LocalStrategy)",
        "from computeshare.strategies.sync import SyncStrategy",
        'spec["strategy"]["kind"] == "async"',
        'kind in ("local", "sync")',
        "spec.strategy.kind != other",
        'match kind:\n    case "local":\n        pass',
    ],
)
def test_a_line_that_depends_on_a_kind_is_found(line: str) -> None:
    assert offences(line, depends_on_a_kind)
    assert not offences('kind = "local" if tensor.kind == "parameter" else strategy.kind', depends_on_a_kind)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_answers_with_its_defaults_alone(kind: str) -> None:
    strategy = KINDS[kind]()
    assert parse_strategy({"kind": kind}) == strategy and strategy.kind == kind and strategy.suits
    assert set(strategy.implied) <= set(JobSpec.model_fields) and set(strategy.instead) == set(strategy.implied)
    spec = JobSpec.model_validate({"dataset": "digits", "model": "mlp", "strategy": {"kind": kind}})
    assert stored(spec.model_dump(mode="json")) == spec.strategy
    assert spec.plan.units_per_round * strategy.steps == spec.micro_batches_per_round


def test_a_stored_job_is_readable_though_its_strategy_is_of_another_release() -> None:
    assert stored({"strategy": {"kind": "local", "inner_steps": 7, "gone": 1}}).steps == 7
    assert stored({"strategy": {"kind": "unheard of"}}).steps == 1
    assert stored({}).steps == 1
