"""The server's optimizer: any of the catalog's, stepping on flat vectors, its state as bytes that hold no code."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from computeshare.errors import ArtifactError, ShapeError, SpecError
from computeshare.jobspec.catalog import catalog
from computeshare.jobspec.optimizer_spec import OptimizerSpec
from computeshare.tensors import safetensors_writer
from computeshare.tensors.layout import Layout
from computeshare.types import Blob, Vector

_NOTHING = torch.empty(0)
BY_VALUE = frozenset(
    ("ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD")
)
"""Optimizers that treat every value alike, whichever tensor it is of."""
Ready = Callable[[Vector], None]
"""Takes the next parameters of a step as they are done, some at a time, in their order."""


class ServerOptimizer:
    """A `torch.optim` optimizer over the tensors of a layout, on the CPU, with no module.

    During a step the parameters are views into one flat vector and their gradients into another; between steps it
    holds its state alone. Where an optimizer's work is the same for every value, they are the layout's buckets, which
    take their step one after the other: many small ones take longer, and a large one goes through memory several times.
    The first one made in a process takes seconds: `torch.optim` imports `torch._dynamo`.
    """

    def __init__(self, layout: Layout, spec: OptimizerSpec, lr_factor: float = 1.0) -> None:
        """`lr_factor` multiplies the rate. Raises SpecError with torch's words where it refuses the arguments."""
        try_out(spec, lr_factor)
        self._name = spec.name
        self._shape = (layout.parameters,)
        self._places = [(t.start, t.stop, t.shape) for t in layout.tensors if t.kind == "parameter"]
        self._turns = [slice(None)]  # which parameters take a step together
        if spec.name in BY_VALUE:
            self._places = [(b.start, b.stop, (b.stop - b.start,)) for b in layout.buckets]
            self._turns = [slice(i, i + 1) for i in range(len(self._places))]
        self._parameters = [nn.Parameter(_NOTHING) for _ in self._places]
        with self._bound(torch.empty(self._shape)):  # some make their state at once
            self._optimizer = build(spec, lr_factor, self._parameters)

    def step(
        self, parameters: Vector, gradient: Vector, in_place: bool = False, ready: Ready = lambda values: None
    ) -> Vector:
        """The next parameters (d,) from these and their gradient (d,). Raises ShapeError.

        Args:
            in_place: write them over these, unless those are read-only; else they are a new array.
            ready: is given the next parameters piece by piece, in order, each once it is done.
        """
        if not parameters.shape == gradient.shape == self._shape:
            raise ShapeError(f"parameters {parameters.shape} and gradient {gradient.shape} must both be {self._shape}")
        following = parameters if in_place and parameters.flags.writeable else parameters.copy()
        gradient = gradient if gradient.flags.writeable else gradient.copy()  # torch warns of anything else
        gradients = torch.from_numpy(gradient)
        with self._bound(torch.from_numpy(following)):
            for turn in self._turns:
                places = self._places[turn]
                for parameter, (start, stop, shape) in zip(self._parameters[turn], places, strict=True):
                    parameter.grad = gradients[start:stop].view(shape)
                self._optimizer.step()
                for parameter in self._parameters[turn]:
                    parameter.grad = None  # the others' turns leave it alone
                ready(following[places[0][0] : places[-1][1]] if places else following)
        return following

    def dump(self) -> list[Blob]:
        """Everything that later steps depend on beside the parameters, as `dump_state` gives it."""
        return dump_state(self._name, self._optimizer)

    def load(self, blob: Blob) -> None:
        """Go on from what `dump` gave, of the same optimizer over the same layout. Raises ArtifactError.

        Where `blob` is writable the state stays there, and the next step writes over it.
        """
        with self._bound(torch.empty(self._shape)):
            load_state(self._name, self._optimizer, blob)

    @contextmanager
    def _bound(self, values: Tensor) -> Iterator[None]:
        """Make the parameters views of this vector for a while."""
        for parameter, (start, stop, shape) in zip(self._parameters, self._places, strict=True):
            parameter.data = values[start:stop].view(shape)
        try:
            yield
        finally:
            for parameter in self._parameters:
                parameter.grad, parameter.data = None, _NOTHING


def dump_state(name: str, optimizer: torch.optim.Optimizer) -> list[Blob]:
    """Everything that later steps depend on beside the parameters, in the safetensors format, in pieces.

    The larger of them are views of the optimizer's own tensors: they hold until its next step.
    """
    (group,) = optimizer.param_groups
    tensors: dict[str, Tensor] = {}
    scalars: list[dict[str, Any]] = []
    for index, parameter in enumerate(group["params"]):
        state = optimizer.state.get(parameter, {})
        tensors |= {f"{index}.{key}": value for key, value in state.items() if isinstance(value, Tensor)}
        scalars.append({key: value for key, value in state.items() if not isinstance(value, Tensor)})
    settings = {key: value for key, value in group.items() if key != "params"}
    state = json.dumps({"optimizer": name, "group": settings, "scalars": scalars})
    return safetensors_writer.pieces(
        {name: t.contiguous().cpu().numpy() for name, t in tensors.items()}, {"state": state}
    )


def load_state(name: str, optimizer: torch.optim.Optimizer, blob: Blob) -> None:
    """Go on from what `dump_state` gave, of the same optimizer over tensors of the same shapes.

    Where `blob` is writable, the optimizer works in its memory; else it gets copies.

    Raises: ArtifactError: it is damaged, or of another optimizer or number of tensors.
    """
    parameters = optimizer.param_groups[0]["params"]
    try:
        tensors, metadata = safetensors_writer.read(blob)
        rest = json.loads(metadata["state"])
        kind, group, scalars = rest["optimizer"], rest["group"], rest["scalars"]
        states: list[dict[str, Any]] = [dict(values) for values in scalars]
        for path, tensor in tensors.items():
            index, key = path.split(".", 1)
            states[int(index)][key] = torch.from_numpy(tensor if tensor.flags.writeable else tensor.copy())
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ArtifactError(f"the optimizer's state is damaged ({error}): take an earlier checkpoint") from error
    if (kind, len(states)) != (name, len(parameters)):
        raise ArtifactError(
            f"the state is that of {kind} over {len(states)} tensors, not of {name} over {len(parameters)}"
        )
    if name in BY_VALUE and not all(_fits(s, p) for s, p in zip(states, parameters, strict=True)):
        raise ArtifactError("the state is that of another model: its tensors are of other sizes")
    optimizer.param_groups[0].update({key: _tuples(value) for key, value in group.items()})
    optimizer.state.clear()
    optimizer.state.update({p: _placed(s, p) for p, s in zip(parameters, states, strict=True) if s})


def _fits(state: dict[str, Any], parameter: Tensor) -> bool:
    """Whether every tensor of the state is a number, or has a number for each of the parameter's."""
    sizes = {value.numel() for value in state.values() if isinstance(value, Tensor) and value.ndim}
    return sizes <= {parameter.numel()}


def _placed(state: dict[str, Any], parameter: Tensor) -> dict[str, Any]:
    """A parameter's state where `torch.optim` expects it: beside the parameter, but for the count of steps."""
    return {
        key: value.to(parameter.device) if isinstance(value, Tensor) and key != "step" else value
        for key, value in state.items()
    }


def build(spec: OptimizerSpec, lr_factor: float, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """The `torch.optim` optimizer over one group of parameters, its rate multiplied by `lr_factor`."""
    arguments = {key: _tuples(value) for key, value in spec.arguments.items()}
    known = catalog().optimizers[spec.name].arguments
    rate = arguments.pop("lr", known["lr"].default)
    group = {"params": parameters}  # a bare list must not be empty, a group may
    optimizer: torch.optim.Optimizer = getattr(torch.optim, spec.name)([group], lr=rate * lr_factor, **arguments)
    return optimizer


def try_out(spec: OptimizerSpec, lr_factor: float) -> None:
    """One step on one number: some arguments are refused by the constructor, some only by a step."""
    parameter = nn.Parameter(torch.ones(1))
    parameter.grad = torch.ones(1)
    try:
        build(spec, lr_factor, [parameter]).step()
    except Exception as error:  # torch checks few arguments itself; the others fail as they may
        raise SpecError(f"optimizer {spec.name} refuses its arguments {spec.arguments}: {error}") from error


def _tuples(value: Any) -> Any:
    """JSON's lists are tuples in torch.optim."""
    return tuple(value) if isinstance(value, list) else value
