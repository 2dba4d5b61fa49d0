"""`python -m computeshare.pipeline.recipes.server SOCKET MEMORY`: the process that holds stages of a recipe's model."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from computeshare.errors import Interrupted
from computeshare.jobspec.tasks.recipe_facts import RecipeFacts
from computeshare.pipeline.chains.stage_trial import ModelStages
from computeshare.pipeline.chains.whole_replica import whole_computation
from computeshare.pipeline.partition import StagePlan
from computeshare.pipeline.splitter import split
from computeshare.pipeline.stage_replica import StageReplica
from computeshare.tasks import modules
from computeshare.tasks.base import Part
from computeshare.tasks.recipes.task import RecipeTask
from computeshare.tensors.layout import Layout
from computeshare.training.computation import LocalComputation
from computeshare.training.memory import peak_bytes
from computeshare.training.recipe_process import messages
from computeshare.training.recipe_process.channel import SocketChannel
from computeshare.training.recipe_process.server import Answer, Server, main
from computeshare.types import Blob


class StageServer(Server):
    """Answers requests with parts of a recipe's model. Only a replay, which holds all stages, has it whole."""

    def __init__(self, *about: Any, **options: Any) -> None:
        super().__init__(*about, **options)
        self._held: StageReplica | None = None
        assert self._spec.recipe_facts
        self._cut = self._spec.recipe_facts.layout
        """The model's layout, with the cuts of the split whose stages are held."""
        own: dict[type[messages.Head], Callable[[Any, bytes], Answer]] = {
            messages.Split: lambda *_: self._split(),
            messages.HoldStages: lambda request, _: (self._hold(request), ()),
            messages.TestStages: lambda request, _: (self._test_stages(request), ()),
            messages.RateStage: lambda request, _: (self._rate(request), ()),
            messages.ComputeStages: lambda request, _: (self._compute_stages(request), ()),
        }
        self._answers |= own

    @property
    def _layout(self) -> Layout:
        return self._cut

    def _built(self, part: Part) -> tuple[Layout, str]:
        outline = self._task.outline()
        frozen = self._task.module(self._spec.seed) if modules.has_frozen(outline) else outline
        return modules.layout_of(outline), modules.frozen_digest(frozen)

    def _check_scores(self, part: Part, task: RecipeTask, facts: RecipeFacts) -> None:
        """Do nothing: only the whole model could be scored."""

    def _computation(self) -> LocalComputation:
        return whole_computation(self._spec, self._instance("train"), self.device)

    def _split(self) -> Answer:
        return messages.SplitUp(), [split(self._task, self._spec.staging, self._spec.plan).dump().encode()]

    def _model(self, stages: str) -> ModelStages:
        """The model, split as a plan says, of which no stages are held."""
        self._held = None  # before there is memory for others
        plan = StagePlan.parse(stages)
        self._cut = plan.cut(self._cut)
        samples = self._task.samples("train", Path())
        about = self._cut, self._spec.plan, self._spec.staging, plan
        return ModelStages(self._task, samples, *about, self.device)

    def _test_stages(self, request: messages.TestStages) -> messages.Tested:
        return self._tested(self._model(request.stages).test(request.room_bytes))

    def _hold(self, request: messages.HoldStages) -> messages.Done:
        self._held = self._model(request.stages).replica(range(request.first, request.stop))
        return messages.Done()

    def _rate(self, request: messages.RateStage) -> messages.Rated:
        return messages.Rated(rate=self._model(request.stages).rate(request.number, self._goes_on()))

    def _load(self) -> messages.Done:
        if self._held is None:
            return super()._load()
        views = self._cut.views(self._shared.weights)
        self._held.load({name: views[name] for name in self._held.names})
        return messages.Done()

    def _compute_stages(self, request: messages.ComputeStages) -> messages.StagesComputed:
        assert self._held is not None
        places = {one.name: slice(one.start, one.stop) for one in self._cut.tensors if one.kind == "buffer"}
        found = []
        for one in self._held.compute(request.unit, _ForwardedMail(self._channel), self._goes_on(), self._take):
            for name, values in one.buffers.items():
                np.copyto(self._shared.new_buffers[places[name]], values)
            found.append(
                messages.StageComputed(
                    stage=one.stage,
                    loss=one.loss,
                    forward_s=one.forward_s,
                    backward_s=one.backward_s,
                    most_in_flight=one.most_in_flight,
                    sent_bytes=one.sent_bytes,
                )
            )
        return messages.StagesComputed(stages=tuple(found), peak_bytes=peak_bytes(self.device))


class _ForwardedMail:
    """A `Mailbox` whose messages the seat passes on."""

    def __init__(self, channel: SocketChannel) -> None:
        self._channel = channel

    def send(self, stage: int, tag: str, message: Blob) -> None:
        self._channel.send(messages.Posted(stage=stage, tag=tag).dumps(), [message])

    def receive(self, stage: int, tag: str) -> Blob:
        self._channel.send(messages.Wanted(stage=stage, tag=tag).dumps())
        head, body = self._channel.receive(messages.MOST_REQUEST, sys.maxsize)
        if isinstance(messages.request_in(head), messages.Delivered):
            return body
        raise Interrupted("the work was called off")


if __name__ == "__main__":
    main(StageServer)
