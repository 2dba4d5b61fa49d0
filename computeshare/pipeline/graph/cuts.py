"""A traced forward pass, cut into stages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from computeshare.errors import SpecError
from computeshare.pipeline.graph.trace import Traced


@dataclass(frozen=True)
class CutGraph:
    """One stage's part of a forward pass.

    `module` maps the model's inputs with numbers `inputs`, then the values of `received`, in order, to a tuple of
    values; the last stage's returns the graph's result. Values go straight from the stage that computes them to each
    stage that uses them.

    Attributes:
        received: the names of the values from each earlier stage, by its number.
        sent: the places in the result of the values for each later stage, by its number.
    """

    module: fx.GraphModule
    inputs: tuple[int, ...]
    received: Mapping[int, tuple[str, ...]]
    sent: Mapping[int, tuple[int, ...]]
    layers: tuple[str, ...]
    """The innermost submodules, for people."""

    @property
    def sent_names(self) -> dict[int, list[str]]:
        """The values for each later stage, by the names of their nodes."""
        (output,) = (node for node in self.module.graph.nodes if node.op == "output")
        return {target: [output.args[0][place].name for place in places] for target, places in self.sent.items()}


def starts(traced: Traced, cuts: Sequence[str]) -> list[int]:
    """Where in `traced.computed` each stage after the first begins. Raises SpecError: a stage would be empty."""
    first: dict[str, int] = {}
    for place, node in enumerate(traced.computed):
        for name in traced.modules_of(node):
            first.setdefault(name, place)
    if missing := [name for name in cuts if name not in first]:
        raise SpecError(f"the model has no submodule {missing[0]} where a stage could begin: name others")
    places = [first[name] for name in cuts]
    for before, after, name in zip([0, *places], places, cuts, strict=False):
        if after <= before:
            raise SpecError(f"no stage can begin at {name}: nothing is computed before it that another split point has "
                            "not, so name split points in the order of the forward pass")  # fmt: skip
    return places


def cut(traced: Traced, places: Sequence[int]) -> list[CutGraph]:
    """Cut a forward pass before the nodes at these places of `traced.computed`."""
    owner: dict[fx.Node, int] = {}
    for place, node in enumerate(traced.computed):
        owner[node] = sum(start <= place for start in places)
    output = next(node for node in traced.graph.nodes if node.op == "output")
    owner[output] = len(places)
    users: dict[fx.Node, list[int]] = {
        node: sorted({owner[user] for user in node.users if user in owner} - {stage}) for node, stage in owner.items()
    }
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    return [_cut(traced, stage, owner, users, placeholders, output) for stage in range(len(places) + 1)]


def _cut(
    traced: Traced,
    stage: int,
    owner: Mapping[fx.Node, int],
    users: Mapping[fx.Node, Sequence[int]],
    placeholders: Sequence[fx.Node],
    output: fx.Node,
) -> CutGraph:
    own = [node for node, number in owner.items() if number == stage]
    needed = {node for one in own for node in one.all_input_nodes}
    inputs = [number for number, node in enumerate(placeholders) if node in needed]
    before = [node for node, number in owner.items() if number < stage and stage in users[node]]
    before.sort(key=lambda node: owner[node])
    is_last = output in own
    after = [] if is_last else [node for node in own if users[node]]
    graph = fx.Graph()
    copied = {node: graph.placeholder(node.name) for node in (*(placeholders[number] for number in inputs), *before)}

    def here(node: fx.Node) -> fx.Node:
        if node not in copied:  # a tensor of the model's, read by each stage that uses it
            assert node.op == "get_attr"
            copied[node] = graph.node_copy(node)
        return copied[node]

    for node in own:
        if node is not output:
            copied[node] = graph.node_copy(node, here)
    graph.output(fx.node.map_arg(output.args[0], here) if is_last else tuple(copied[node] for node in after))
    layers = dict.fromkeys(name for node in own for name in traced.modules_of(node)[-1:])
    return CutGraph(
        fx.GraphModule(traced.root, graph),
        tuple(inputs),
        {
            source: tuple(node.name for node in before if owner[node] == source)
            for source in sorted({owner[node] for node in before})
        },
        {
            target: tuple(place for place, node in enumerate(after) if target in users[node])
            for target in sorted({target for node in after for target in users[node]})
        },
        tuple(layers),
    )
