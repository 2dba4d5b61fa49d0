"""A model's forward pass as a graph of its submodules, cut into stages.

`torch.fx` traces the outermost code only: submodules stay calls, whatever their code does, and keep their state and
their names. Where that code cannot be traced so, `torch.export` traces all of the model, for one size of batch.
"""

import inspect
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from computeshare.errors import SpecError
from computeshare.pipeline.frames import Value, changed
from computeshare.pipeline.graph.module_tensors import named_tensors, put, stand_ins
from computeshare.tasks.base import Batch, Task

_tracing = threading.Lock()
"""Held while a model is traced: torch patches its modules for that, in the whole process."""
Arguments = Mapping[str, Value]
"""The arguments of a model's `forward`, by name."""


class _Asked(Exception):
    """The loss called the model."""


class _Listener(nn.Module):
    def forward(self, *args: Value, **kwargs: Value) -> Value:
        raise _Asked(args, kwargs)


class _Answer(nn.Module):
    """In place of a model: returns what its stages computed."""

    def __init__(self, result: Value) -> None:
        super().__init__()
        self._result, self._is_used = result, False

    def forward(self, *_: Value, **__: Value) -> Value:
        if self._is_used:
            raise SpecError("the loss calls the model more than once, so the model cannot be split into stages")
        self._is_used = True
        return self._result


def arguments_of(task: Task, signature: inspect.Signature, batch: Batch) -> Arguments:
    """The arguments with which the task's loss calls its model, whose forward has this signature, on a batch.

    Raises: SpecError: they have no names.
    """
    try:
        task.loss(_Listener(), batch)
    except _Asked as asked:
        args, kwargs = asked.args
    else:
        raise SpecError("the loss does not call the model, so the model cannot be split into stages")
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
        raise SpecError("the model's forward takes * arguments: name them, so that the model can be split into stages")
    return signature.bind(*args, **kwargs).arguments


def loss_of(task: Task, result: Value, batch: Batch) -> Tensor:
    """The task's loss of a batch, given the model's result for it."""
    return task.loss(_Answer(result), batch)


@dataclass(frozen=True)
class Traced:
    """A forward pass. `root` has the submodules and tensors that the graph names."""

    root: nn.Module
    graph: fx.Graph
    inputs: Callable[[Arguments], Sequence[Value]]
    """The values of the graph's placeholders."""
    result: Callable[[Value], Value]
    """The model's result, from the graph's."""
    is_sized: bool = False
    """Whether it is for one size of batch."""

    def modules_of(self, node: fx.Node) -> list[str]:
        """The names of the submodules in whose forward pass a node is, the outermost first."""
        stack = node.meta.get("nn_module_stack") or {}
        return [name for name, _ in stack.values() if name]

    @property
    def computed(self) -> list[fx.Node]:
        """The nodes that compute, in order."""
        return [node for node in self.graph.nodes if node.op not in ("placeholder", "get_attr", "output")]


def trace(module: nn.Module, arguments: Arguments, opened: Collection[str] = ()) -> Traced:
    """Trace a module's forward pass.

    Args:
        opened: names of submodules whose own code is traced too; of a plain `nn.Sequential` it always is.
    Raises: SpecError: it depends on values that are only known when it runs, or on Python that cannot be traced.
    """
    try:
        return trace_outer(module, arguments, opened)
    except Exception as outer:  # any code of the model's can fail, in any way, on stand-ins for tensors
        try:
            with _tracing:
                return _trace_all(module, arguments)
        except Exception as error:
            why = f"{type(error).__name__}: {error}".partition("\n")[0][:300]
            raise SpecError(
                "the model cannot be split here, because what its forward does next depends on values that are known "
                "only when it runs, or because it is Python that cannot be traced. Name split points inside a part "
                "that always runs in the same order (strategy.split, such as blocks.2), or change forward. "
                f"torch.export says: {why} (torch.fx: {str(outer).partition(chr(10))[0][:200]})"
            ) from error


class _Tracer(fx.Tracer):
    """While it traces, torch.fx has all modules of the process call it; other threads' are let through."""

    def __init__(self, opened: Collection[str]) -> None:
        super().__init__(param_shapes_constant=True)
        self._opened, self._thread = opened, threading.get_ident()

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return type(m) is not nn.Sequential and module_qualified_name not in self._opened


def trace_outer(module: nn.Module, arguments: Arguments, opened: Collection[str]) -> Traced:
    """As `trace`, by torch.fx alone. Raises whatever the model's code raises, given stand-ins for tensors."""
    parameters = inspect.signature(module.forward).parameters
    defaults = {name: one.default for name, one in parameters.items() if name not in arguments}
    with _tracing:
        graph = _Tracer(opened).trace(module, concrete_args=defaults or None)
    for node in graph.nodes:
        if node.op == "placeholder" and node.target not in arguments:
            _erase(graph, node)
    names = [str(node.target) for node in graph.nodes if node.op == "placeholder"]
    return Traced(module, graph, lambda given: [given[name] for name in names], lambda result: result)


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a node and its users: torch's own checks that an argument has its default."""
    for user in [*node.users]:
        _erase(graph, user)
    graph.erase_node(node)


def _trace_all(module: nn.Module, arguments: Arguments) -> Traced:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True):
        faked = stand_ins(module, "cpu")
        given = {name: changed(value, _on_cpu) for name, value in arguments.items()}
    exported = torch.export.export(faked, (), given)
    whole = exported.module(check_guards=False)
    for name, tensor in named_tensors(module):
        put(whole, name, tensor)
    structure = exported.call_spec.out_spec
    sizes = [tensor.shape for tensor in _leaves(arguments) if isinstance(tensor, Tensor)]

    def inputs(given: Arguments) -> Sequence[Value]:
        leaves = _leaves(given)
        found = [tensor.shape for tensor in leaves if isinstance(tensor, Tensor)]
        assert found == sizes, f"traced for {sizes}, called with {found}"
        return leaves

    return Traced(whole, whole.graph, inputs, lambda result: pytree.tree_unflatten([*result], structure), True)


def _on_cpu(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu")


def _leaves(arguments: Arguments) -> list[Value]:
    leaves: list[Value] = pytree.tree_leaves(((), dict(arguments)))
    return leaves
