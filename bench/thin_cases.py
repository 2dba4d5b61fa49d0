"""The cases of `bench.thin`: links, models, and how ComputeShare and its peers train."""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.links import Shape
from bench.peer_methods import METHODS
from bench.support.small_gpt import ADAMW, GPT
from computeshare.jobspec.sampling_plan import Plan
from computeshare.jobspec.spec import JobSpec

WORKERS = 2
MOMENTUM: dict[str, Any] = {"name": "SGD", "lr": 0.02, "momentum": 0.9}
BASE: dict[str, Any] = {
    "dataset": "mnist",
    "micro_batch": 32,
    "micro_batches_per_round": WORKERS,
    "optimizer": MOMENTUM,
    "threads": 1,
    "checkpoint_every": 0,
    "keep": {"every": 1},
    "evaluate_every": 0,
}
RESNET: dict[str, Any] = {"model": "resnet18", "input": [3, 32, 32]}
SMALL_GPT: dict[str, Any] = {**GPT, "micro_batch": 6, "optimizer": ADAMW | {"lr": 0.002}}


def codec(up: str, down: str = "") -> dict[str, Any]:
    """JobSpec fields for these codecs; by default the same both ways."""
    return {"codec": {"up": up, "down": down or up}}


DIFFERENCES = codec("int8")


BUFFER = 14
"""Units of a version of `gossip`: with 50 steps of 6 samples, an epoch of tinyshakespeare and two versions more are
24,086 samples.
"""
OVERLAP: dict[str, Any] = {"overlap": 10, "inner_state": "kept", "outer_lr": 0.8, "outer_momentum": 0.75}
"""Fields of strategy `local` for rounds of 25 steps of the small GPT, so that these steps hide a link of 5 Mbit/s."""
NO_DATA: Mapping[str, Any] = {}
FROM_STRATEGY: dict[str, Any] = {"micro_batches_per_round": None, "optimizer": None}
"""Fields that follow from a strategy with inner steps."""


def local(
    inner_steps: int,
    lr: float,
    codecs: Mapping[str, Any] = DIFFERENCES,
    inner: Mapping[str, Any] = MOMENTUM,
    **changes: Any,
) -> dict[str, Any]:
    """JobSpec fields for strategy `local` with `inner_steps` steps per round: plain averaging, or with a delay its own
    outer step. `changes`: to the strategy.
    """
    stepped = {**inner, "lr": lr}
    strategy = {"kind": "local", "inner_steps": inner_steps, "replicas": WORKERS, "inner_optimizer": stepped}
    outer = {} if "delay" in changes else {"outer_lr": 1, "outer_momentum": 0}
    return {**codecs, **FROM_STRATEGY, "strategy": strategy | outer | changes}


def gossip(every: int, batch: int, lr: float = 2e-3, up: str = "int8") -> dict[str, Any]:
    """JobSpec fields for strategy `gossip` with so many steps of AdamW between exchanges."""
    strategy = {"kind": "gossip", "every": every, "buffer": BUFFER, "inner_optimizer": ADAMW | {"lr": lr}}
    return {**codec(up, "float32"), "micro_batch": batch, "strategy": strategy}


Ours = Mapping[str, Mapping[str, Any]]
"""JobSpec fields by name of a configuration."""
INT8: Ours = {"sync, int8": DIFFERENCES}
AUTO: Ours = {"local, auto": local(20, 0.02, {"codec": "auto"})}
HIDDEN_LINK: Ours = {
    "local of 50, int8": local(50, 0.02),
    "local of 50, int8, delay": local(50, 0.02, delay=1),
    "local of 50, int8, overlap of 30": local(50, 0.02, overlap=30),
}
"""Waiting for the mean, and the two ways to compute meanwhile."""
CHOICES: Ours = {
    **INT8,
    "sync, lowrank4": codec("lowrank4"),
    "sync, lowrank4, delay": codec("lowrank4") | {"strategy": {"delay": 1}},
    "sync, lowrank2, delay": codec("lowrank2") | {"strategy": {"delay": 1}},
    "sync, topk, delay": codec("topk") | {"strategy": {"delay": 1}},
    **HIDDEN_LINK,
    "local of 50, int4, delay": local(50, 0.02, codec("int4"), delay=1),
    **AUTO,
}


@dataclass(frozen=True, slots=True)
class Case:
    """One comparison. `base` holds JobSpec fields that override BASE for all; each of `ours` overrides both, and None
    removes a field. `peers` are names of `peer_methods.METHODS`.

    `samples`: samples that all train on; 0: as many as the time allows. `score_every`: samples between scores.
    `accuracy`: target (a fraction) for the comparison of times. `unshaped`: peers' accuracy comes from separate runs
    without a link, and their runs over the link measure only rates. `peer_limit_s`: time limit of a peer's run over the
    link; 0: `limit_s`. `images`: JPEGs to make and train on, in place of the data set of `base`; 0: none.
    """

    shape: Shape
    base: Mapping[str, Any]
    ours: Ours
    peers: Sequence[str] = ("ddp",)
    limit_s: float = 60.0
    samples: int = 0
    score_every: int = 0
    accuracy: float | None = None
    unshaped: bool = False
    peer_limit_s: float = 0.0
    images: int = 0


EVERY_PEER = tuple(METHODS)
_SIMPLENET: dict[str, Any] = {"model": "simplenet"}
CASES: dict[str, Case] = {
    "simplenet-20mbit": Case(Shape(20), _SIMPLENET, INT8, limit_s=20),
    "simplenet-20mbit-topk": Case(Shape(20), _SIMPLENET, {"sync, topk": codec("topk")}, limit_s=20),
    "simplenet-20mbit-20ms": Case(Shape(20, 20), _SIMPLENET, INT8, limit_s=20),
    "simplenet-5mbit": Case(Shape(5), _SIMPLENET, INT8, limit_s=30),
    "resnet18-100mbit": Case(Shape(100), RESNET, CHOICES, EVERY_PEER),
    "resnet18-20mbit": Case(Shape(20), RESNET, CHOICES, EVERY_PEER, 90),
    "resnet18-20mbit-40ms": Case(Shape(20, 40), RESNET, CHOICES, EVERY_PEER, 90),
    "resnet18-5mbit": Case(Shape(5), RESNET, CHOICES, EVERY_PEER, 180),
    "resnet18-20mbit-accuracy": Case(
        Shape(20), RESNET, CHOICES, EVERY_PEER, 900, 57_600, score_every=6400, unshaped=True, peer_limit_s=60
    ),
    "resnet18-20mbit-jpegs": Case(Shape(20), RESNET, HIDDEN_LINK, EVERY_PEER, 90, images=20_000),
    "resnet18-20mbit-jpegs-accuracy": Case(
        Shape(20),
        RESNET,
        HIDDEN_LINK,
        ("local",),
        900,
        120_000,
        score_every=6400,
        unshaped=True,
        peer_limit_s=60,
        images=20_000,
    ),
    "resnet18-5mbit-auto": Case(Shape(5), RESNET, AUTO, limit_s=600, peer_limit_s=180),
    "gpt-5mbit": Case(
        Shape(5),
        SMALL_GPT,
        {
            "gossip of 50, int8": FROM_STRATEGY | gossip(50, 6),
            "local of 50, int8": local(50, 0.002, inner=ADAMW),
            "local of 50, int8, delay": local(50, 0.002, delay=1, inner=ADAMW),
            "local of 25, int4, overlap of 10": local(25, 0.002, codec("int4"), ADAMW, **OVERLAP),
        },
        EVERY_PEER,
        60,
    ),
    "lenet5-to-98": Case(
        Shape(20),
        {"model": "lenet5"},
        {"local of 50, int8": local(50, 0.03)},
        limit_s=900,
        samples=240_000,
        score_every=6400,
        accuracy=0.98,
    ),
}


def selected(ours: Ours, names: Sequence[str] | None) -> Ours:
    """The configurations with these names; None: all. Ends the process if one is unknown."""
    if unknown := {*(names or ())} - {*ours}:
        sys.exit(f"no such configuration: {sorted(unknown)}; there are {[*ours]}")
    return {name: ours[name] for name in names or ours}


def specs(case: Case, data: Mapping[str, Any] = NO_DATA) -> tuple[dict[str, dict[str, Any]], JobSpec]:
    """The documents of ComputeShare's jobs, and the peers' JobSpec.

    Args:
        data: the data set to train on, as `ours.add_data`; empty: that of the case's `base`.
    """
    facts = {**data["facts"], "kind": data["kind"], "bundle": data["bundle"]} if data else {}
    given = {"dataset": data["name"], "data": facts} if data else {}
    peer = JobSpec.model_validate_json(json.dumps({**BASE, **case.base, **given, "rounds": 1}))
    documents = {name: _document(case, fields, given) for name, fields in case.ours.items()}
    return documents, peer.model_copy(update={"rounds": _rounds_of(peer.plan, case.samples)})


def _document(case: Case, fields: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    document = {name: value for name, value in {**BASE, **case.base, **given, **fields}.items() if value is not None}
    plan = JobSpec.model_validate_json(json.dumps({**document, "rounds": 1})).plan
    document.pop("data", None)  # the API has these facts from the data set's name
    document.setdefault("rounds", _rounds_of(plan, case.samples))
    if case.score_every:
        document["checkpoint_every"] = max(1, case.score_every // (plan.micro_batch * plan.micro_batches_per_round))
    return document


def _rounds_of(plan: Plan, samples: int) -> int:
    """The number of rounds for this many samples (0: a million rounds); an epoch's last round may be shorter."""
    epochs, rest = divmod(samples, plan.samples)
    return epochs * plan.rounds_per_epoch - (-rest // (plan.micro_batch * plan.micro_batches_per_round)) or 1_000_000
