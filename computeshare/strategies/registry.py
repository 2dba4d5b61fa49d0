"""The list of strategies, and the parser of the JobSpec's `strategy` field."""

from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias, get_args

from pydantic import BeforeValidator, ValidationError
from pydantic_core import InitErrorDetails

from computeshare.jobspec.part import error_at
from computeshare.strategies.base import Strategy
from computeshare.strategies.buffered_async import AsyncStrategy
from computeshare.strategies.gossip import GossipStrategy
from computeshare.strategies.local import LocalStrategy
from computeshare.strategies.pipeline import PipelineStrategy
from computeshare.strategies.signsgd import SignStrategy
from computeshare.strategies.sync import SyncStrategy

AnyStrategy: TypeAlias = SyncStrategy | AsyncStrategy | LocalStrategy | GossipStrategy | PipelineStrategy | SignStrategy
"""The only list of strategies: add new kinds here."""
KINDS: Mapping[str, type[AnyStrategy]] = {one.model_fields["kind"].default: one for one in get_args(AnyStrategy)}
DEFAULT = SyncStrategy()


def parse_strategy(value: Any) -> AnyStrategy:
    """Parse a strategy from an object with a `kind` (by default the default strategy's), or return a parsed one.

    Raises: ValidationError, ValueError: the kind or one of its fields is invalid.
    """
    if isinstance(value, AnyStrategy):
        return value
    if not isinstance(value, dict):
        raise ValueError("strategy must be an object with a kind and that kind's fields")
    kind = value.get("kind", DEFAULT.kind)
    if kind not in list(KINDS):  # a list, because `kind` may not be hashable
        expected = ", ".join(f"'{name}'" for name in KINDS)
        error = InitErrorDetails(type="literal_error", loc=("kind",), input=kind, ctx={"expected": expected})
        raise ValidationError.from_exception_data("strategy", [error])
    known = KINDS[kind].model_fields
    for name in value:
        if name not in known:
            raise error_at(
                "strategy", str(name), f"unknown field; fields of strategy {kind}: {', '.join(sorted(known))}"
            )
    return KINDS[kind].model_validate(value)


Named: TypeAlias = Annotated[AnyStrategy, BeforeValidator(parse_strategy)]
"""A pydantic field for a strategy. Errors mention the fields of the named kind only."""


def stored(spec: Mapping[str, Any]) -> Strategy:
    """The strategy of a stored job's specification; not validated if this release rejects it but another wrote it."""
    document = spec.get("strategy", {})
    try:
        return parse_strategy(document)
    except ValueError:
        return KINDS.get(document.get("kind"), type(DEFAULT)).model_construct(**document)


def implied_by(document: Any) -> dict[str, Any]:
    """The fields of the JobSpec that a strategy determines; empty if this release does not know the strategy."""
    try:
        return parse_strategy(document).implied
    except ValueError:
        return {}
