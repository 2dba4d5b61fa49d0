"""A job's set-up in a reducer: everything that stays the same from round to round, built once."""

import contextlib
import secrets
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from computeshare.bundles.store import BundleStore
from computeshare.checkpoints.retention import Retention
from computeshare.checkpoints.store import Artifacts
from computeshare.codecs.messages import is_news, update_parts
from computeshare.codecs.registry import CODECS
from computeshare.errors import ArtifactError, SpecError
from computeshare.jobspec.sampling_plan import Plan
from computeshare.jobspec.spec import JobSpec
from computeshare.pipeline.partition import StagePlan
from computeshare.protocol.reducer_session import ReducerSession
from computeshare.protocol.terms import Terms
from computeshare.queue.recipe_runner import RecipeRunner
from computeshare.reducer.codec_choice import Decider
from computeshare.reducer.gather import Gatherer
from computeshare.reducer.recovery import Recovery
from computeshare.tensors.layout import Layout

if TYPE_CHECKING:
    from computeshare.tasks.initial_state import InitialState
    from computeshare.training.server_step import ServerStep


@dataclass(frozen=True, slots=True)
class JobContext:
    """A job's constants in a reducer; `server_step` holds the optimizer's state, `gatherer` buffers to decode into."""

    spec: JobSpec
    plan: Plan
    layout: Layout
    kind: dict[str, str | int]
    """Kind of the machine that reduces: device, torch's version and the like, for a replay to compare."""
    gatherer: Gatherer
    server_step: "ServerStep"
    recovery: Recovery
    retention: Retention
    frozen: str
    """Digest of the parameters that are not trained; empty: there are none."""

    @property
    def has_drafts(self) -> bool:
        """Whether buckets of a version may be made and published before its round is complete."""
        return self.spec.has_drafts and len(self.layout.buckets) > 1 and not self.layout.cuts

    @property
    def kept_bytes(self) -> int:
        """How many bytes of counted updates the broker may keep in place of the state of each version: what
        `JobSpec.broker_bytes` allows for one round. 0: each version's state is stored, because it is small, because it
        lacks the parameters, or because steps cannot be repeated from updates alone.
        """
        if is_news(self.layout) or self.server_step.is_exact or self.spec.strategy.averaging:
            return 0
        return self.plan.units_per_round * self.layout.parameters * self.gatherer.codec.bytes_per_value

    @property
    def terms(self) -> Terms:
        """The terms that the scripts hold every round to."""
        spec, strategy = self.spec, self.spec.strategy
        limits = strategy.backup, spec.sharers, spec.workers.min, strategy.most_unmeasured, self.gatherer.limit
        return Terms(
            *limits,
            spec.audit or 0,
            secrets.token_hex(16) if spec.audit else "",
            self.frozen,
            update_parts(self.layout),
            strategy.averaging is not None,
            strategy.staging is not None,
            strategy.lag > 0,
        )


def _frozen(initial: "InitialState", artifacts: Artifacts) -> str:
    """The digest of the parameters that are not trained: as the job began, on whatever machine that was."""
    if not initial.has_frozen:
        return ""
    for token in reversed(artifacts.tokens()):
        with contextlib.suppress(ArtifactError):
            return artifacts.manifest(token).frozen
    return initial.frozen


def _cut(session: ReducerSession, spec: JobSpec, layout: Layout, recipes: RecipeRunner | None) -> Layout:
    """The layout with the cuts between stages, which are decided and told to the workers, unless they have been.

    Raises: as `_split`.
    """
    from computeshare.pipeline.chains.stage_needs import check_mail

    text = session.stages()
    if text is None:
        plan = _split(session, spec, recipes)
        check_mail(plan, spec.staging, spec.plan)
        text = session.fix_stages(plan.dump())
        about = [{"layers": one.layers, "parameters": one.parameters, "cost": one.cost} for one in plan.stages]
        session.announce("split", {"stages": about})
    return StagePlan.parse(text).cut(layout)


def _split(session: ReducerSession, spec: JobSpec, recipes: RecipeRunner | None) -> StagePlan:
    """How the model is split; a recipe's by its own code, confined.

    Raises: SpecError: the model cannot be split so, or this reducer may not run recipes; RecipeError, BundleError,
        Unconfined.
    """
    from computeshare.pipeline.splitter import split
    from computeshare.tasks.registry import task_of

    if spec.recipe is None:
        return split(task_of(spec), spec.staging, spec.plan)
    if recipes is None:
        raise SpecError(
            "the recipe's model is split by its own code, which this reducer may not run: start it with --recipes, or "
            "choose another strategy"
        )
    from computeshare.pipeline.recipes.process import StageProcess

    with contextlib.closing(recipes.start(StageProcess, session.redis, session.job_id, spec, "train")) as process:
        return process.split()


def set_up(
    session: ReducerSession,
    artifacts: Artifacts,
    bundles: BundleStore,
    decider: Decider,
    helper: Executor,
    recipes: RecipeRunner | None = None,
) -> JobContext | None:
    """Build a job's context from its specification; None if the job is gone.

    Args:
        bundles: with the initial state of a recipe's job.
        helper: reads updates ahead.
        recipes: None: this process runs none.
    Raises: Undecided: the codecs are still being chosen; ValidationError: the specification is not one.
    """
    raw = session.spec()
    if raw is None:
        return None
    spec = decider.decide(JobSpec.model_validate_json(raw))
    import torch

    from computeshare.tasks.initial_state import initial_state_of
    from computeshare.training import devices
    from computeshare.training.server_step import ServerStep

    initial = initial_state_of(spec, bundles)
    layout = _cut(session, spec, initial.layout, recipes) if spec.strategy.staging else initial.layout
    gatherer = Gatherer(session, CODECS[spec.codecs.up], layout, spec.plan, helper, spec.sharers)
    server_step = ServerStep(spec, layout)
    return JobContext(
        spec,
        spec.plan,
        layout,
        devices.kind(torch.device("cpu")),
        gatherer,
        server_step,
        Recovery(session, artifacts, initial, server_step, gatherer, CODECS[spec.codecs.down]),
        Retention(artifacts, spec),
        _frozen(initial, artifacts),
    )
