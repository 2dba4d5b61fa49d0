"""Recovery: load the version that a job has reached from the broker, from disk, or from how it began."""

import dataclasses
import functools
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from computeshare.checkpoints.store import Artifacts
from computeshare.codecs.base import Codec
from computeshare.codecs.messages import add_delta, decode_weights
from computeshare.codecs.registry import EXACT
from computeshare.errors import ArtifactError, CodecError, LostClaim, ShapeError
from computeshare.jobspec.sampling_plan import Round
from computeshare.protocol.reducer_session import ReducerSession, StoredStep
from computeshare.protocol.refusal import Received
from computeshare.protocol.round_store import RoundState
from computeshare.protocol.versions.chain import Chain, route
from computeshare.reducer.gather import Gatherer
from computeshare.tensors.layout import Weights
from computeshare.types import Token, Vector

if TYPE_CHECKING:
    from computeshare.tasks.initial_state import InitialState
    from computeshare.training.server_step import ServerModel, ServerStep

log = structlog.get_logger()

REPLAYED_VALUES = 1 << 28
"""The most values of updates and parameters in the steps that a reducer repeats when it takes over: about half a second
on a fast processor, several times as long with a robust `combine`.
"""


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    """A version in a reducer's memory."""

    token: Token
    model: "ServerModel"
    sha256: str = ""
    """Digest of the published weights; empty: not known."""
    before: Weights | None = None
    """The version before, as workers hold it, if the checkpoint has it."""


@dataclass(slots=True)
class StoredState:
    """The version whose state is the newest in the broker, and what was counted since."""

    token: Token
    steps: int = 0
    """The number of versions since."""
    counted: list[tuple[str, int]] = field(default_factory=list)
    """The updates that made them, by base token and unit."""
    bytes: int = 0
    """Of those updates."""

    def count(self, parts: Sequence[Received]) -> None:
        """Note that a version was made of these updates."""
        self.steps += 1
        self.counted += [(part.base, part.micro_batch) for part in parts]
        self.bytes += sum(part.size for part in parts)

    def is_outdated(self, parameters: int, room_bytes: int) -> bool:
        """Whether the newest version's state is to be stored before the next commit: with another version like those
        since, there would be more than `REPLAYED_VALUES` to repeat, or more than `room_bytes` of updates to keep.
        """
        values, steps = parameters * (self.steps + len(self.counted)), self.steps
        takes_long = values * (steps + 1) > REPLAYED_VALUES * steps
        return takes_long or not room_bytes or self.bytes * (steps + 1) > room_bytes * steps


class Recovery:
    """Loads the version that a job has reached; `server_step` gets the optimizer's state of that version."""

    def __init__(
        self,
        session: ReducerSession,
        artifacts: Artifacts,
        initial: "InitialState",
        server_step: "ServerStep",
        gatherer: Gatherer,
        down: Codec,
    ) -> None:
        self._session, self._artifacts, self._initial, self._server_step = session, artifacts, initial, server_step
        self._gatherer, self._layout, self._plan, self._down = gatherer, gatherer.layout, gatherer.plan, down
        self._reported: set[Token] = set()

    def initial(self) -> "ServerModel":
        """Version 0, as the job begins."""
        return self._server_step.load(self._initial.weights(), b"")

    def on_disk(self) -> LoadedVersion | None:
        """Load the newest undamaged checkpoint of the job's current branch; announce damaged ones."""
        for token in reversed(self._artifacts.tokens()):
            try:
                weights = self._layout.gather(self._artifacts.tensors(token))
                before = self._artifacts.before(token)
                model = self._server_step.load(weights, self._artifacts.state(token))
                return LoadedVersion(token, model, before=self._layout.gather(before) if before else None)
            except (ArtifactError, ShapeError, struct.error) as error:
                self._pass_over(token, str(error))
        return None

    def _pass_over(self, token: Token, error: str) -> None:
        if token in self._reported:
            return
        self._reported.add(token)
        log.error("checkpoint passed over", job=self._session.job_id, token=str(token), error=error)
        event = {"token": str(token), "version": token.version}
        self._session.announce("damaged", event | {"error": f"{error}. The one before is taken"})

    def broker_went_back(self, state: RoundState) -> bool:
        """Whether the broker lost durable versions, or holds an incarnation other than the newest on record.

        If so, the broker's round is discarded.
        """
        if state.token.incarnation != self._artifacts.incarnation():
            return self._session.discard(state)
        newest = self._artifacts.tokens()[-1:]
        if not newest or newest[0].version <= state.version:
            return False
        found = self.on_disk()  # the newest may be damaged
        return found is not None and found.token.version > state.version and self._session.discard(state)

    def in_broker(self, state: RoundState) -> tuple[LoadedVersion, Chain]:
        """Load the base version of a running round, and the chain of differences that leads to it.

        If the version's state was not stored yet, the steps since the newest stored state are repeated.

        Raises: LostClaim: some of the data are gone, because another reducer went on or the broker lost them.
            CodecError: some are damaged.
        """
        tokens, snapshot = self._session.chain()
        weights, delta_bytes = self._weights(state.token, tokens, snapshot)
        if weights is None:
            raise LostClaim(f"the weights of version {state.token} are gone")
        if self._layout.digest(weights)[:16] != state.token.digest16:
            raise CodecError(f"the weights of version {state.token} do not match its digest")
        whole_bytes = 4 * self._layout.parameters
        chain = Chain([Token.parse(one) for one in tokens], Token.parse(snapshot), whole_bytes, delta_bytes)
        steps = self._session.steps()
        if steps and (why := _gap(steps, state)):
            raise CodecError(f"the steps to version {state.token} are damaged: {why}")
        model = self._repeat_steps(state, steps, weights) if steps else self._with_state(state.token, weights)
        return LoadedVersion(state.token, model), chain

    def published(self, token: Token) -> Weights:
        """The weights of a version that the broker holds. Raises LostClaim: they are gone; CodecError."""
        weights = self._weights(token, *self._session.chain())[0]
        if weights is None:
            raise LostClaim(f"the weights of version {token} are gone")
        return weights

    def _weights(
        self, token: Token, chain: Sequence[str], snapshot: str, out: Vector | None = None
    ) -> tuple[Weights | None, int]:
        """A version's published weights, None if they are gone, and the total bytes of their differences.

        Args:
            out: overwritten with the parameters (d,) if versions are published whole.
        """
        load, keys = self._session.load, self._session.keys
        if not self._server_step.chained:
            message = load(keys.weights(str(token)))
            return None if message is None else decode_weights(self._down, message, self._layout, out), 0
        path = route(chain, snapshot, "", str(token))
        if path is None or path.snapshot is None or (message := load(keys.weights(path.snapshot))) is None:
            return None, 0
        weights, delta_bytes = decode_weights(EXACT, message, self._layout), 0
        for later in path.deltas:
            if (delta := load(keys.delta(later))) is None:
                return None, 0
            weights = add_delta(self._down, delta, self._layout, weights)
            delta_bytes += sum(map(len, delta))
        return weights, delta_bytes

    def _with_state(self, token: Token, weights: Weights) -> "ServerModel":
        """The version `token` with its state from the broker."""
        raw = self._session.load_state(token)
        if raw is None:
            raise LostClaim(f"the state of version {token} is gone")
        return self._server_step.load(weights, raw)

    def _repeat_steps(self, state: RoundState, steps: Sequence[StoredStep], weights: Weights) -> "ServerModel":
        """Repeat the steps that led from the version whose state is stored to the current version, `weights`, and store
        its state; a version that is its weights alone needs no step.
        """
        base, counted = steps[0].base, [update for step in steps for update in step.counted]
        if self._server_step.is_stateless:
            model = self._server_step.load(weights, b"")
        else:
            model = self._stepped_again(state.token, steps, weights)
        if not self._session.store_state(base, counted, state.token, self._server_step.dump(model.master)):
            raise LostClaim(f"version {state.token} has been succeeded meanwhile")
        return model

    def _stepped_again(self, token: Token, steps: Sequence[StoredStep], weights: Weights) -> "ServerModel":
        """Repeat the steps that lead to the version `token` from the version whose state is stored.

        Args:
            weights: the version's; overwritten if the steps begin with the parameters that were published before: with
                a large model, memory used for the first time can take longer than the steps.
        """
        before: Weights | None = weights  # a state with parameters of its own needs no weights
        if self._server_step.is_exact:
            before = self._weights(steps[0].base, *self._session.chain(), out=weights.parameters)[0]
        if before is None:
            raise LostClaim(f"the weights before version {token} are gone")
        model = self._with_state(steps[0].base, before)
        for step in steps:
            gradient = self._server_step.combine(
                functools.partial(self._reread, step, token),
                [self._plan.unit_size(unit) for _, unit in step.counted],
                [staleness(one, step.base) for one, _ in step.counted],
            )
            master = self._server_step.next_parameters(step.base.version + 1, model, gradient)
            model = dataclasses.replace(model, master=master)
        if self._server_step.is_exact:
            weights = dataclasses.replace(weights, parameters=model.master)
            if self._layout.digest(weights)[:16] != token.digest16:
                raise CodecError(f"the steps to version {token} lead to other weights")
        return dataclasses.replace(model, published=weights)

    def _reread(self, step: StoredStep, token: Token, bucket: int) -> Iterator[Vector]:
        """Yield a bucket of each update of a step before the version `token`, in the order of units."""
        for update in step.counted:
            values = self._gatherer.reread(update, bucket)
            if values is None:
                raise LostClaim(f"the state of version {token} has been stored meanwhile")
            yield values


def _gap(steps: Sequence[StoredStep], state: RoundState) -> str | None:
    """The reason why the steps do not lead to the version of `state`, one version after another; None if they do."""
    versions = [step.base.version for step in steps]
    if steps[-1].base != state.base:
        return f"the last is from version {steps[-1].base}, not from {state.base}"
    if versions != [*range(versions[0], state.version)]:
        return f"they are from versions {versions}"
    return None


def damage(state: RoundState, planned: Round, total: int) -> str | None:
    """The reason why the broker's round `state` cannot belong to the job; None if it can. Pure.

    Args:
        planned: the round after the same version, by the job's plan.
        total: the job's number of rounds.
    """
    if state.status == "finished" and state.version < total:
        return f"its rounds are finished at version {state.version} of {total}"
    if state.version > total or (state.version == total and state.status in ("running", "paused")):
        return f"it is {state.status} at version {state.version} of {total}"
    if state.version < total and planned.wanted is None:  # a window's first unit depends on the units counted before
        found, expected = (state.first, state.count, state.needed), (planned.first, planned.count, planned.needed)
        if found != expected:
            return f"the round of version {state.version} has first, count and needed {found} instead of {expected}"
    return None


def staleness(base: str, current: Token) -> int:
    """Staleness in versions of an update that was computed on version `base`."""
    return current.version - Token.parse(base).version
