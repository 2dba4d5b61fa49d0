"""How a model is split into stages, as plain data: fixed when a job begins, the same for all of its workers."""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from pydantic import TypeAdapter

from computeshare.tensors.layout import Layout


@dataclass(frozen=True, slots=True)
class StageFacts:
    """One stage: a run of consecutive layers.

    Attributes:
        names: entries of the layout that the stage owns, of all kinds, in the layout's order.
        borrowed: entries that a lower stage owns and this stage uses too: tied weights, or constant buffers.
        layers: names of its submodules, for people.
        parameters: number of values of the parameters it owns.
        cost: floating-point operations of one piece's forward pass; 0: not known.
        border_bytes: bytes of one piece's values that it sends to later stages, as float32; 0: not known.
        forms: the form (`frames.form_of`) of the values for each later stage, by its number and the samples of a piece;
            empty: not known.
    """

    names: tuple[str, ...]
    borrowed: tuple[str, ...]
    layers: tuple[str, ...]
    parameters: int
    cost: float = 0.0
    border_bytes: int = 0
    forms: Mapping[str, str] = field(default_factory=dict)

    def form(self, target: int, count: int) -> str | None:
        """The form of the values that it sends of a piece of `count` samples to a later stage; None: not known."""
        return self.forms.get(f"{target}.{count}")


@dataclass(frozen=True)
class StagePlan:
    """A split model: its stages in order, and the submodules (`cuts`) before whose first call a later stage begins.

    Each entry of the layout is owned by exactly one stage: by the first that uses it.
    """

    cuts: tuple[str, ...]
    stages: tuple[StageFacts, ...]

    @cached_property
    def owners(self) -> dict[str, int]:
        """The number of the stage that owns each entry of the layout."""
        return {name: number for number, stage in enumerate(self.stages) for name in stage.names}

    def cuts_of(self, layout: Layout) -> tuple[int, ...]:
        """The places in the parameter vector where another stage's parameters begin, ascending, without 0."""
        places = [one for one in layout.tensors if one.kind == "parameter" and one.stop > one.start]
        pairs = itertools.pairwise(places)
        return tuple(after.start for before, after in pairs if self.owners[before.name] != self.owners[after.name])

    def cut(self, layout: Layout) -> Layout:
        """The layout with the cuts of this plan."""
        return replace(layout, cuts=self.cuts_of(layout))

    def stage_of_buckets(self, layout: Layout) -> tuple[int, ...]:
        """The stage that owns each of `layout.buckets`; the layout has this plan's cuts."""
        places = [one for one in layout.tensors if one.kind == "parameter" and one.stop > one.start]
        owners: list[int] = []
        index = 0
        for bucket in layout.buckets:
            while index < len(places) - 1 and places[index].stop <= bucket.start:
                index += 1
            owners.append(self.owners[places[index].name] if places else 0)
        return tuple(owners)

    def check(self, layout: Layout, stages: int) -> None:
        """Raises ValueError: this is no split into so many stages of a model with this layout."""
        entries = {one.name: one for one in layout.tensors}
        names = [name for one in self.stages for name in one.names]
        if len(self.stages) != stages or len(self.cuts) != stages - 1 or sorted(names) != sorted(entries):
            raise ValueError(f"the plan has no {stages} stages that own each of the model's tensors once")
        for number, one in enumerate(self.stages):
            own = sum(
                entries[name].stop - entries[name].start for name in one.names if entries[name].kind == "parameter"
            )
            if own != one.parameters or any(self.owners.get(name, number) >= number for name in one.borrowed):
                raise ValueError(f"the plan says of stage {number} what is not so")

    def dump(self) -> str:
        """This plan as JSON."""
        return _PLAN.dump_json(self).decode()

    @staticmethod
    def parse(text: str | bytes) -> "StagePlan":
        """Raises ValueError: the text is no plan."""
        return _PLAN.validate_json(text)


_PLAN = TypeAdapter(StagePlan)


def used(stages: Sequence[StageFacts]) -> tuple[str, ...]:
    """The entries of the layout that these stages use, each once."""
    return tuple(dict.fromkeys(name for stage in stages for name in (*stage.names, *stage.borrowed)))
