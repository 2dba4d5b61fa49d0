"""Splits a task's model into stages, without memory for its weights."""

import inspect
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import nn

from computeshare.errors import SpecError
from computeshare.jobspec.sampling_plan import Plan
from computeshare.pipeline.frames import form_of
from computeshare.pipeline.graph.balance import Segment, balanced, shares
from computeshare.pipeline.graph.cuts import CutGraph, cut, starts
from computeshare.pipeline.graph.survey import Survey, survey
from computeshare.pipeline.graph.trace import Arguments, Traced, arguments_of, trace, trace_outer
from computeshare.pipeline.partition import StageFacts, StagePlan
from computeshare.strategies.base import Staging
from computeshare.tasks import modules
from computeshare.tasks.base import Task, moved

VECTORS = 4
"""Vectors of a stage's size in its worker's memory, at least: weights, the next ones, the gradient, a message."""
MOST_OPENED = 24
"""How often a large submodule is opened to look for split points in it."""


def split(task: Task, staging: Staging, plan: Plan) -> StagePlan:
    """Split the task's model as its job asks: at the named submodules, or into stages that ask about as much.

    The answer depends on the model and the size of a piece alone, so that every machine with the same torch finds it.
    Raises: SpecError: the model cannot be split so; the message says what to do.
    """
    module = task.outline().train()
    arguments = sample_arguments(task, module, plan.micro_batch // plan.accumulate)
    if staging.split:
        cuts = tuple(staging.split)
        traced = trace(module, arguments, opened(cuts))
        found = survey(traced, arguments)
        _check(starts(traced, cuts), cuts, found)
    else:
        traced, found, cuts = _chosen(module, arguments, staging.stages)
    forms = [_forms(task, module, cuts, count) for count in piece_sizes(plan)] if found else []
    return _plan_of(module, traced, found, cuts, forms)


def cut_model(task: Task, module: nn.Module, cuts: Sequence[str], count: int) -> tuple[Traced, list[CutGraph]]:
    """Cut a module of the task's again, as a plan's `cuts` say, for pieces of `count` samples. Raises SpecError."""
    traced = trace(module, sample_arguments(task, module, count), opened(cuts))
    return traced, cut(traced, starts(traced, cuts))


def piece_sizes(plan: Plan) -> list[int]:
    """The numbers of samples that a piece may have, the usual one first."""
    last = plan.pieces(plan.micro_batches_per_epoch - 1)
    sizes = [plan.micro_batch // plan.accumulate, *(piece.stop - piece.start for piece in last)]
    return [*dict.fromkeys(sizes)]


def sample_arguments(task: Task, module: nn.Module, count: int) -> Arguments:
    """The arguments of the model's forward for a piece of `count` samples, without values."""
    batch = task.noise(count, 0).batch(np.arange(count))
    return arguments_of(task, inspect.signature(module.forward), moved(batch, torch.device("meta")))


def opened(names: Iterable[str]) -> set[str]:
    """The submodules that contain these."""
    parts = [name.split(".") for name in names]
    return {".".join(part[:stop]) for part in parts for stop in range(1, len(part))}


def first_names(module: nn.Module) -> dict[str, str]:
    """Of each name in the `state_dict`, the entry of the layout: the first name of its tensor."""
    entries = {id(tensor): name for name, tensor, _ in modules.entries(module)}
    state = module.state_dict(keep_vars=True)
    return {name: entries[id(tensor)] for name, tensor in state.items() if id(tensor) in entries}


def _check(places: Sequence[int], cuts: Sequence[str], found: Survey | None) -> None:
    for place, name in zip(places, cuts, strict=True):
        if found and place in found.together:
            raise SpecError(
                f"no stage can begin at {name}: it changes what came before it in place, or shares statistics with it; "
                "name the submodule before it, or one after it (strategy.split)"
            )


def _chosen(module: nn.Module, arguments: Arguments, stages: int) -> tuple[Traced, Survey, tuple[str, ...]]:
    """Trace the module, opening submodules that are too large for a stage, and choose where to cut it."""
    is_open: set[str] = set()
    closed: set[str] = set()
    traced = trace(module, arguments)
    while True:
        found = survey(traced, arguments)
        if found is None:
            raise SpecError(
                "where to split the model cannot be found out, because what it computes depends on its values: name "
                "split points (strategy.split, such as blocks.2)"
            )
        points = _split_points(traced, found)
        places = [0, *points, len(traced.computed)]
        segments = [*_segments(module, found, places)]
        large = (one for one in _large(module, traced, segments, places, stages) if one not in closed)
        name = next(large, None)
        if name is None or len(is_open | closed) >= MOST_OPENED:
            break
        try:
            traced = trace_outer(module, arguments, is_open | {name})
            is_open.add(name)
        except Exception:  # its code cannot be traced: it stays whole
            closed.add(name)
    most = _most_stages(segments)
    if most < stages:
        raise SpecError(f"the model can be split into {most} stages at most: lower strategy.stages")
    return traced, found, tuple(points[places[number]] for number in balanced(segments, stages))


def _split_points(traced: Traced, found: Survey) -> dict[int, str]:
    """The places where a stage may begin, each with the name of the submodule that begins there."""
    seen: set[str] = set()
    points: dict[int, str] = {}
    for place, node in enumerate(traced.computed):
        new = [name for name in traced.modules_of(node) if name not in seen]
        seen.update(new)
        if place and new and place not in found.together:
            points[place] = new[-1]
    return points


def _segments(module: nn.Module, found: Survey, places: Sequence[int]) -> Iterator[Segment]:
    sizes = {name: 4 * tensor.numel() for name, tensor, kind in modules.entries(module) if kind == "parameter"}
    first = first_names(module)
    for start, stop in itertools.pairwise(places):
        names = {first[name] for place in range(start, stop) for name in found.reads[place] if name in first}
        weights = sum(sizes.pop(name, 0) for name in sorted(names))
        kept = sum(found.bytes_of[start:stop])
        yield Segment(sum(found.work[start:stop]), VECTORS * weights + kept, found.border(start), weights)


def _most_stages(segments: Sequence[Segment]) -> int:
    return sum(one.weights > 0 for one in segments)


def _large(
    module: nn.Module, traced: Traced, segments: Sequence[Segment], places: Sequence[int], stages: int
) -> Iterator[str]:
    """Submodules that are called whole and have submodules of their own, in segments too large for balanced stages, the
    largest first; in any segments if there are too few.
    """
    parts = shares(segments)
    for number in sorted(range(len(segments)), key=lambda one: -parts[one]):
        if parts[number] < 1 / stages and _most_stages(segments) >= stages:
            return
        for node in traced.computed[places[number] : places[number + 1]]:
            if node.op == "call_module" and [*module.get_submodule(str(node.target)).children()]:
                yield str(node.target)


def _forms(task: Task, module: nn.Module, cuts: Sequence[str], count: int) -> list[dict[str, str]]:
    """As `StageFacts.forms`, of each stage, for pieces of `count` samples; empty ones where that is not known."""
    traced, parts = cut_model(task, module, cuts, count)
    found = survey(traced, sample_arguments(task, module, count))
    return [
        {
            f"{target}.{count}": form_of([found.results[name] for name in names])
            for target, names in part.sent_names.items()
            if found
        }
        for part in parts
    ]


def _plan_of(
    module: nn.Module,
    traced: Traced,
    found: Survey | None,
    cuts: tuple[str, ...],
    forms: Sequence[Sequence[Mapping[str, str]]],
) -> StagePlan:
    places = starts(traced, cuts)
    parts, first = cut(traced, places), first_names(module)
    uses = [{first[name] for name in part.module.state_dict(keep_vars=True) if name in first} for part in parts]
    entries = {name: (kind, tensor.numel()) for name, tensor, kind in modules.entries(module)}
    owners: dict[str, int] = {}
    for name, (kind, _) in entries.items():
        users = [stage for stage, used in enumerate(uses) if name in used]
        owners[name] = users[0] if users else next(reversed(owners.values()), 0)
        if len(users) > 1 and kind != "parameter" and (found is None or name in found.changed):
            raise SpecError(f"stages {users[0]} and {users[1]} would both change {name}: name other split points")
    facts = []
    for stage, (start, stop) in enumerate(itertools.pairwise([0, *places, len(traced.computed)])):
        names = tuple(name for name in entries if owners[name] == stage)
        facts.append(
            StageFacts(
                names,
                tuple(name for name in entries if name in uses[stage] and owners[name] != stage),
                parts[stage].layers,
                sum(entries[name][1] for name in names if entries[name][0] == "parameter"),
                float(sum(found.work[start:stop])) if found else 0.0,
                _bytes_sent(traced, parts[stage], found, range(start, stop)) if found else 0,
                {key: form for sized in forms for key, form in sized[stage].items()},
            )
        )
    return StagePlan(cuts, tuple(facts))


def _bytes_sent(traced: Traced, part: CutGraph, found: Survey, places: range) -> int:
    """Bytes of a stage's values for later stages, once for each stage that they go to."""
    by_name = {traced.computed[place].name: found.bytes_of[place] for place in places}
    return sum(by_name[name] for names in part.sent_names.values() for name in names)
