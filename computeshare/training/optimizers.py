"""The server's optimizer: any `torch.optim` optimizer of the catalog, on flat vectors, with a safetensors state."""

import copy
import functools
import inspect
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from computeshare.errors import ArtifactError, ShapeError, SpecError
from computeshare.jobspec.catalog import catalog
from computeshare.jobspec.optimizer_spec import BY_VALUE, OptimizerSpec
from computeshare.jobspec.schedule import EVERY_STEP_ALIKE, StepRules
from computeshare.tensors import safetensors_writer
from computeshare.tensors.layout import Layout
from computeshare.tensors.layout import Tensor as LayoutTensor
from computeshare.types import Blob, Vector

_NOTHING = torch.empty(0)
_RATE = "initial_lr"
"""Key in an optimizer's groups, as torch's schedulers use it: the learning rate before any factor."""
States = dict[Tensor, dict[str, Any]]
"""A parameter to its state in an optimizer."""
Ready = Callable[[Vector], None]
"""Called with consecutive pieces of the new parameters during a step, as each piece is ready."""


class ServerOptimizer:
    """A `torch.optim` optimizer over the tensors of a layout, on the CPU, without a module.

    During a step the parameters are views into one flat vector and the gradients into another; between steps only the
    optimizer's state stays in memory. For an element-wise optimizer the parameters are the layout's buckets, stepped
    one after the other: many small tensors take longer, and one large vector goes through memory several times.
    """

    def __init__(self, layout: Layout, spec: OptimizerSpec, rules: StepRules = EVERY_STEP_ALIKE) -> None:
        """Raises SpecError with torch's message: it refuses the arguments."""
        try_out(spec, rules)
        self._name, self._rules = spec.name, rules
        self._shape = (layout.parameters,)
        self._tensors = [t for t in layout.tensors if t.kind == "parameter"]
        self._places = [(t.start, t.stop, t.shape) for t in self._tensors]
        decayed = [rules.decays(t.shape) for t in self._tensors]
        self._turns = [slice(None)]  # the parameters that take a step together
        if spec.name in BY_VALUE:
            self._places, decayed, self._turns = _pieces(layout, self._tensors, decayed)
        self._parameters = [nn.Parameter(_NOTHING) for _ in self._places]
        with self._bound(torch.empty(self._shape)):  # some optimizers create state in their constructor
            self._optimizer = build_optimizer(spec, rules, self._parameters, decayed)

    def step(
        self,
        parameters: Vector,
        gradient: Vector,
        position: float = 0,
        in_place: bool = False,
        ready: Ready = lambda values: None,
    ) -> Vector:
        """Take a step: the new parameters (d,) from `parameters` (d,) and their `gradient` (d,). Raises ShapeError.

        Args:
            position: rounds since version 0, for the schedule.
            in_place: overwrite `parameters` and `gradient` where they are writable; else the result is a new array.
            ready: called with each piece of the new parameters, in order.
        """
        if not parameters.shape == gradient.shape == self._shape:
            raise ShapeError(f"parameters {parameters.shape} and gradient {gradient.shape} must both be {self._shape}")
        following = parameters if in_place and parameters.flags.writeable else parameters.copy()
        if (self._rules.clip_norm and not in_place) or not gradient.flags.writeable:
            # clipping changes the gradient in place; torch warns about an array that is not writable
            gradient = gradient.copy()
        gradients = torch.from_numpy(gradient)
        clip((gradients[t.start : t.stop].view(t.shape) for t in self._tensors), self._rules.clip_norm)
        set_rate(self._optimizer, self._rules, position)
        with self._bound(torch.from_numpy(following)):
            for turn in self._turns:
                places = self._places[turn]
                for parameter, (start, stop, shape) in zip(self._parameters[turn], places, strict=True):
                    parameter.grad = gradients[start:stop].view(shape)
                self._optimizer.step()
                for parameter in self._parameters[turn]:
                    parameter.grad = None  # so that the other turns' steps skip it
                ready(following[places[0][0] : places[-1][1]] if places else following)
        return following

    def step_bucket(self, bucket: int, parameters: Vector, gradient: Vector, position: float = 0) -> States:
        """Take the step of one bucket of an element-wise optimizer without `clip_norm`, to the bits of `step`.

        Args:
            parameters: the bucket's, which are overwritten; `gradient`: theirs. Both are writable.
            position: as for `step`.
        Returns: the states of the bucket's parameters after the step, for `adopt`; the optimizer's own do not change.
        """
        turn, state = self._turns[bucket], self._optimizer.state
        mine, first = self._parameters[turn], self._places[turn][0][0]
        before: States = {one: state.pop(one) for one in mine if one in state}
        for parameter, kept in before.items():
            state[parameter] = {
                key: value.clone() if isinstance(value, Tensor) else value for key, value in kept.items()
            }
        set_rate(self._optimizer, self._rules, position)
        values, gradients = torch.from_numpy(parameters), torch.from_numpy(gradient)
        try:
            for parameter, (start, stop, shape) in zip(mine, self._places[turn], strict=True):
                parameter.data = values[start - first : stop - first].view(shape)
                parameter.grad = gradients[start - first : stop - first].view(shape)
            self._optimizer.step()
            return {one: state.pop(one) for one in mine if one in state}
        finally:
            for parameter in mine:
                parameter.grad, parameter.data = None, _NOTHING
                state.pop(parameter, None)
            state.update(before)

    def adopt(self, states: States) -> None:
        """Continue from these states of `step_bucket`."""
        self._optimizer.state.update(states)

    def dump(self) -> list[Blob]:
        """The optimizer's state, as by `dump_state`."""
        return dump_state(self._name, self._optimizer, self._parameters)

    def load(self, blob: Blob) -> None:
        """Restore the state from `dump`, of the same optimizer over the same layout. Raises ArtifactError.

        If `blob` is writable, the state stays in its memory, and the next step overwrites it.
        """
        with self._bound(torch.empty(self._shape)):
            load_state(self._name, self._optimizer, self._parameters, blob)

    @contextmanager
    def _bound(self, values: Tensor) -> Iterator[None]:
        """Make the parameters views of this vector within the block."""
        for parameter, (start, stop, shape) in zip(self._parameters, self._places, strict=True):
            parameter.data = values[start:stop].view(shape)
        try:
            yield
        finally:
            for parameter in self._parameters:
                parameter.grad, parameter.data = None, _NOTHING


def dump_state(name: str, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor]) -> list[Blob]:
    """An optimizer's state in safetensors format, in pieces, without its settings.

    Large pieces are views of the optimizer's tensors, valid until its next step.

    Args:
        parameters: all of the optimizer's parameters.
    """
    tensors: dict[str, Tensor] = {}
    scalars: list[dict[str, Any]] = []
    for index, parameter in enumerate(parameters):
        state = optimizer.state.get(parameter, {})
        tensors |= {f"{index}.{key}": value for key, value in state.items() if isinstance(value, Tensor)}
        scalars.append({key: value for key, value in state.items() if not isinstance(value, Tensor)})
    state = json.dumps({"optimizer": name, "scalars": scalars})
    return safetensors_writer.pieces(
        {name: t.contiguous().cpu().numpy() for name, t in tensors.items()}, {"state": state}
    )


def load_state(name: str, optimizer: torch.optim.Optimizer, parameters: Sequence[Tensor], blob: Blob) -> None:
    """Restore the state from `dump_state`, of the same optimizer over tensors of the same shapes in the same order; for
    an element-wise one, over the same values in pieces of any sizes.

    The settings stay as they are: a fork may have another learning rate. If `blob` is writable, the optimizer works in
    its memory; else it gets copies.

    Raises: ArtifactError: the state is damaged, or of another optimizer or model.
    """
    try:
        tensors, metadata = safetensors_writer.read(blob)
        rest = json.loads(metadata["state"])
        kind, scalars = rest["optimizer"], rest["scalars"]
        states: list[dict[str, Any]] = [dict(values) for values in scalars]
        for path, tensor in tensors.items():
            index, key = path.split(".", 1)
            states[int(index)][key] = torch.from_numpy(tensor if tensor.flags.writeable else tensor.copy())
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ArtifactError(f"the optimizer's state is damaged ({error}): take an earlier checkpoint") from error
    if kind == name and name in BY_VALUE:
        states = _in_pieces(states, [parameter.numel() for parameter in parameters])
    if (kind, len(states)) != (name, len(parameters)):
        raise ArtifactError(
            f"the state is that of {kind} over {len(states)} tensors, not of {name} over {len(parameters)}"
        )
    if name in BY_VALUE and not all(_fits(s, p) for s, p in zip(states, parameters, strict=True)):
        raise ArtifactError("the state is that of another model: its tensors are of other sizes")
    optimizer.state.clear()
    optimizer.state.update({p: _placed(s, p) for p, s in zip(parameters, states, strict=True) if s})


def _in_pieces(states: list[dict[str, Any]], sizes: list[int]) -> list[dict[str, Any]]:
    """The states of an element-wise optimizer's pieces, cut into pieces of these sizes; as they are if they fit, or
    belong to another number of values.
    """
    lengths = [
        {key: value.numel() for key, value in one.items() if isinstance(value, Tensor) and value.ndim} for one in states
    ]
    vectors = [*lengths[0]] if lengths else []
    known = [[one.get(key, 0) for one in lengths] for key in vectors]
    if any(0 in one or sum(one) != sum(sizes) for one in known):
        return states
    if len(states) == len(sizes) and all(one == sizes for one in known):
        return states
    first = {key: value for one in states[:1] for key, value in one.items() if key not in vectors}
    found = [copy.deepcopy(first) for _ in sizes]
    for key in vectors:
        joined = torch.cat([state[key].flatten() for state in states])
        for state, piece in zip(found, torch.split(joined, sizes), strict=True):
            state[key] = piece
    return found


def _fits(state: dict[str, Any], parameter: Tensor) -> bool:
    """Whether every tensor of the state is a scalar or has as many values as the parameter."""
    sizes = {value.numel() for value in state.values() if isinstance(value, Tensor) and value.ndim}
    return sizes <= {parameter.numel()}


def _placed(state: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    """A parameter's state, moved to the parameter's device as `torch.optim` expects, except for the step count."""
    return {
        key: value.to(parameter.device) if isinstance(value, Tensor) and key != "step" else value
        for key, value in state.items()
    }


FUSED = ("Adagrad", "Adam", "AdamW", "SGD")
"""Optimizers of which torch has a kernel for the whole step of a parameter on the CPU."""


def build_optimizer(
    spec: OptimizerSpec,
    rules: StepRules,
    parameters: Sequence[nn.Parameter],
    decayed: Sequence[bool],
    fused: bool = False,
) -> torch.optim.Optimizer:
    """Build the `torch.optim` optimizer over these parameters.

    Args:
        decayed: whether weight decay applies to each parameter.
        fused: take steps by one kernel for each parameter, on the CPU, if torch has one: several go through memory for
            each operation. Their last bits differ.
    """
    arguments = {key: _tuples(value) for key, value in spec.arguments.items()}
    rate = arguments.pop("lr", catalog().optimizers[spec.name].arguments["lr"].default)
    subject = [p for p, decays in zip(parameters, decayed, strict=True) if decays]
    exempt = [p for p, decays in zip(parameters, decayed, strict=True) if not decays]
    groups: list[dict[str, Any]] = [{"params": subject, _RATE: rate}]
    if exempt:
        groups.append({"params": exempt, _RATE: rate, "weight_decay": 0.0})
    if fused and spec.name in FUSED:
        arguments["fused"] = True
    return _uncompiled(spec.name)(groups, lr=rate * rules.lr_factor, **arguments)


@functools.cache
def _uncompiled(name: str) -> Callable[..., torch.optim.Optimizer]:
    """The class of `torch.optim`, less the wrappers of its methods that serve `torch.compile` alone.

    The wrappers import `torch._dynamo`: seconds of a process's start, and about 100 MB.
    """
    kind = getattr(torch.optim, name)
    step = torch.no_grad()(inspect.unwrap(kind.step))
    return type(name, (kind,), {"add_param_group": inspect.unwrap(kind.add_param_group), "step": step})


def set_rate(optimizer: torch.optim.Optimizer, rules: StepRules, position: float) -> None:
    """Set the rate of an optimizer that `build` made for the step that starts `position` rounds after version 0."""
    factor = rules.rate_factor(position)
    for group in optimizer.param_groups:
        group["lr"] = group[_RATE] * factor


def clip(gradients: Iterable[Tensor], norm: float) -> None:
    """Scale gradients down to a total Euclidean norm, as `torch.nn.utils.clip_grad_norm_` does; 0: leave them."""
    if norm:
        gradients = list(gradients)
        total = torch.nn.utils.get_total_norm(gradients)
        torch._foreach_mul_(gradients, torch.clamp(norm / (total + 1e-6), max=1.0))


def try_out(spec: OptimizerSpec, rules: StepRules, fused: bool = False) -> None:
    """Take a step on a single value, since torch refuses some arguments only in a step; `fused` as for
    `build_optimizer`. Raises SpecError.
    """
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    try:
        build_optimizer(spec, rules, [parameter], [True], fused).step()
    except Exception as error:  # torch checks few arguments; others fail with any exception
        raise SpecError(f"optimizer {spec.name} refuses its arguments {spec.arguments}: {error}") from error


def _pieces(
    layout: Layout, tensors: Sequence[LayoutTensor], decayed: Sequence[bool]
) -> tuple[list[tuple[int, int, tuple[int, ...]]], list[bool], list[slice]]:
    """Cut a layout's buckets where weight decay begins or ends.

    Returns: (start, stop, shape) of each piece, whether weight decay applies to it, and the pieces of each bucket.
    """
    runs: list[tuple[int, int, bool]] = []
    for tensor, decays in zip(tensors, decayed, strict=True):
        start = runs.pop()[0] if runs and runs[-1][2] == decays else tensor.start
        runs.append((start, tensor.stop, decays))
    places: list[tuple[int, int, tuple[int, ...]]] = []
    flags, turns = list[bool](), list[slice]()
    for bucket in layout.buckets:
        before = len(places)
        for start, stop, decays in runs:
            first, end = max(start, bucket.start), min(stop, bucket.stop)
            if first < end:
                places.append((first, end, (end - first,)))
                flags.append(decays)
        turns.append(slice(before, len(places)))
    return places, flags, turns


def _tuples(value: Any) -> Any:
    """Turn JSON's lists into tuples, as torch.optim expects."""
    return tuple(value) if isinstance(value, list) else value
