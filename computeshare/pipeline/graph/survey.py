"""The cost of a forward pass, and where it may be cut, found on the meta device: without values and without memory.

The first survey in a process takes seconds, in which torch imports its compiler.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from computeshare.pipeline.frames import Value, tensors_of
from computeshare.pipeline.graph.module_tensors import named_tensors, stand_ins
from computeshare.pipeline.graph.trace import Arguments, Traced

OPERATIONS_PER_VALUE = 8
"""Cost of moving a value, in operations: layers without products take time too."""


@dataclass(frozen=True)
class Survey:
    """Facts found in a forward pass, by places in `Traced.computed`.

    Attributes:
        work: operations of each node.
        results: each node's result, its tensors without values, by the node's name.
        bytes_of: each node's result's bytes.
        last_use: the last place that reads each node's result.
        reads: the names of the model's tensors that each node reads.
        together: places where no stage may begin: what is changed in place stays in one stage with what changes it.
        changed: the names of the buffers that the forward pass changes.
    """

    work: Sequence[float]
    results: Mapping[str, Value]
    bytes_of: Sequence[int]
    last_use: Sequence[int]
    reads: Sequence[frozenset[str]]
    together: frozenset[int]
    changed: frozenset[str]

    def border(self, place: int) -> int:
        """Bytes of all values that cross a cut before this place."""
        return sum(self.bytes_of[one] for one in range(place) if self.last_use[one] >= place)


def survey(traced: Traced, arguments: Arguments) -> Survey | None:
    """Run a traced forward pass without values. None: it needs values to run."""
    nodes = traced.computed
    place_of = {node: place for place, node in enumerate(nodes)}
    root = stand_ins(traced.root, "meta")
    buffers = {name: (tensor, tensor._version) for name, tensor in root.named_buffers(remove_duplicate=False)}
    interpreter = _Interpreter(root, traced.graph)
    try:
        interpreter.survey(traced.inputs(arguments))
    except Exception:  # any code of the model's can fail, in any way
        return None
    changed = frozenset(name for name, (tensor, version) in buffers.items() if tensor._version != version)
    reads = _reads(traced)
    together: set[int] = set()
    for maker, changer in interpreter.changes:
        together |= {*range(place_of.get(maker, -1) + 1, place_of.get(changer, -1) + 1)}
    for name in changed:
        users = [place for place, names in enumerate(reads) if name in names]
        together |= {*range(users[0] + 1, users[-1] + 1)} if users else set()
    return Survey(
        [interpreter.work[node] for node in nodes],
        {node.name: interpreter.env[node] for node in nodes},
        [interpreter.bytes[node] for node in nodes],
        [max((place_of.get(user, len(nodes)) for user in node.users), default=-1) for node in nodes],
        reads,
        frozenset(together),
        changed,
    )


class _Interpreter(fx.Interpreter):
    """Runs a graph, and notes each node's operations and the nodes whose results it changes in place."""

    def __init__(self, root: nn.Module, graph: fx.Graph) -> None:
        super().__init__(root, garbage_collect_values=False, graph=graph)
        self.work: dict[fx.Node, float] = {}
        self.bytes: dict[fx.Node, int] = {}
        self.changes: list[tuple[fx.Node, fx.Node]] = []
        from torch.utils.flop_counter import FlopCounterMode  # it imports Triton, which seats do not need

        self._counter = FlopCounterMode(display=False)
        self._versions: dict[fx.Node, list[tuple[Tensor, int]]] = {}

    def survey(self, inputs: Sequence[Any]) -> None:
        with torch.no_grad(), self._counter:
            self.run(*inputs, enable_io_processing=False)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if isinstance(kwargs.get("device"), torch.device):  # as it was traced
            kwargs = {**kwargs, "device": torch.device("meta")}
        return super().call_function(target, args, kwargs)

    def run_node(self, n: fx.Node) -> Any:
        before = self._counter.get_total_flops()
        result = super().run_node(n)
        for node, seen in self._versions.items():
            for number, (tensor, version) in enumerate(seen):
                if tensor._version != version:
                    self.changes.append((node, n))
                    seen[number] = tensor, tensor._version
        if n.op not in ("output", "get_attr"):
            found = [*tensors_of(result)]
            self._versions[n] = [(tensor, tensor._version) for tensor in found]
            self.bytes[n] = sum(tensor.nbytes for tensor in found)
            moved = OPERATIONS_PER_VALUE * sum(tensor.numel() for tensor in found)
            self.work[n] = self._counter.get_total_flops() - before + moved
        return result


def _reads(traced: Traced) -> list[frozenset[str]]:
    state = [name for name, _ in named_tensors(traced.root)]
    found = []
    for node in traced.computed:
        names = {str(one.target) for one in node.all_input_nodes if one.op == "get_attr"}
        if node.op == "call_module":
            names |= {name for name in state if name.startswith(f"{node.target}.")}
        found.append(frozenset(names))
    return found
