"""Where a job stands, as a reducer finds it: on disk, in the broker, or at its beginning."""

import dataclasses
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from computeshare.checkpoints.store import Artifacts
from computeshare.codecs.messages import add_delta, decode_weights
from computeshare.codecs.registry import CODECS, EXACT
from computeshare.errors import ArtifactError, CodecError, LostClaim, ShapeError
from computeshare.jobspec.sampling_plan import Round
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.reducer_session import Claim
from computeshare.protocol.round_store import RoundState
from computeshare.protocol.version_chain import Chain, route
from computeshare.reducer.gather import Gatherer
from computeshare.tensors.layout import Weights
from computeshare.types import Token, Vector

if TYPE_CHECKING:
    from computeshare.training.server_step import Held, Steps

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RecoveredVersion:
    """What a reducer holds of a version."""

    token: Token
    held: "Held"
    sha256: str = ""
    """Of its weights; empty: not known."""


class Standing:
    """Finds the version that a job has come to; `steps` takes over the optimizer's state that goes with it."""

    def __init__(self, rounds: Claim, artifacts: Artifacts, spec: JobSpec, steps: "Steps", gatherer: Gatherer) -> None:
        self._rounds, self._artifacts, self._spec, self._steps = rounds, artifacts, spec, steps
        self._gatherer, self._layout, self._plan = gatherer, gatherer.layout, gatherer.plan
        self._down = CODECS[spec.codecs.down]
        self._told: set[Token] = set()

    def initial(self) -> "Held":
        """The weights that the job's seed gives."""
        from computeshare.tasks import modules
        from computeshare.tasks.images import models

        spec = self._spec
        module = models.of(spec)
        return self._steps.load(modules.weights_of(module, self._layout), b"")

    def on_disk(self) -> RecoveredVersion | None:
        """The newest whole checkpoint of those that lead to where the job stands; of the others the timeline tells."""
        for token in reversed(self._artifacts.tokens()):
            try:
                manifest = self._artifacts.manifest(token)
                weights = self._layout.gather(self._artifacts.tensors(token))
                if self._layout.digest(weights) != manifest.sha256:
                    raise ArtifactError("its weights are not those that its manifest names")
                return RecoveredVersion(token, self._steps.load(weights, self._artifacts.state(token)))
            except (ArtifactError, ShapeError, struct.error) as error:
                self._pass_over(token, str(error))
        return None

    def _pass_over(self, token: Token, error: str) -> None:
        if token in self._told:
            return
        self._told.add(token)
        log.error("checkpoint passed over", job=self._rounds.job_id, token=str(token), error=error)
        event = {"token": str(token), "version": token.version}
        self._rounds.announce("damaged", event | {"error": f"{error}. The one before is taken"})

    def went_back(self, state: RoundState) -> bool:
        """Whether the broker went back behind what is durable, or to another incarnation than the newest on record.

        Its round is given up then.
        """
        if state.token.incarnation != self._artifacts.incarnation():
            return self._rounds.discard(state)
        newest = self._artifacts.tokens()[-1:]
        if not newest or newest[0].version <= state.version:
            return False
        found = self.on_disk()  # the newest may be damaged
        return found is not None and found.token.version > state.version and self._rounds.discard(state)

    def in_broker(self, state: RoundState) -> tuple[RecoveredVersion, Chain]:
        """The version of a running round and its chain, from the weights and the optimizer's state, or what made that.

        Raises LostClaim: something of it is gone, for another reducer goes on, or the broker has lost it;
        CodecError: it is damaged.
        """
        tokens, snapshot = self._rounds.chain()
        weights, delta_bytes = self._weights(state.token, tokens, snapshot)
        if weights is None:
            raise LostClaim(f"the weights of version {state.token} are gone")
        if self._layout.digest(weights)[:16] != state.token.digest16:
            raise CodecError(f"the weights of version {state.token} do not match its digest")
        whole_bytes = 4 * self._layout.parameters
        chain = Chain([Token.parse(one) for one in tokens], Token.parse(snapshot), whole_bytes, delta_bytes)
        raw = self._rounds.load_state(state.token)
        held = self._repeated(state, weights) if raw is None else self._steps.load(weights, raw)
        return RecoveredVersion(state.token, held), chain

    def _weights(self, token: Token, chain: Sequence[str], snapshot: str) -> tuple[Weights | None, int]:
        """A version's weights as workers hold them, None if they are gone, and the bytes of the differences to them."""
        load, keys = self._rounds.load, self._rounds.keys
        if not self._steps.chained:
            message = load(keys.weights(str(token)))
            return None if message is None else decode_weights(self._down, message, self._layout), 0
        way = route(chain, snapshot, "", str(token))
        if way is None or way.snapshot is None or (message := load(keys.weights(way.snapshot))) is None:
            return None, 0
        weights, delta_bytes = decode_weights(EXACT, message, self._layout), 0
        for one in way.deltas:
            if (delta := load(keys.delta(one))) is None:
                return None, 0
            weights = add_delta(self._down, delta, self._layout, weights)
            delta_bytes += sum(map(len, delta))
        return weights, delta_bytes

    def _repeated(self, state: RoundState, weights: Weights) -> "Held":
        """Repeat the step that led to the current version, from the state before and the round's submissions."""
        base = state.base
        raw = self._rounds.load_state(base) if base else None
        held_before = self._weights(base, *self._rounds.chain())[0] if base else None
        if base is None or raw is None or held_before is None:
            raise LostClaim(f"the state before version {state.token} is gone")
        before = self._steps.load(held_before, raw)
        counted, sizes = self._rounds.counted(state)
        samples = [self._plan.unit_size(unit, sizes) for _, unit in counted]

        def read(bucket: int) -> Iterator[Vector]:
            return (self._again(one, bucket, state.token) for one in counted)

        gradient = self._steps.combine(read, samples, [behind(token, base) for token, _ in counted])
        held = dataclasses.replace(before, master=self._steps.optimizer.step(before.master, gradient), weights=weights)
        if not self._rounds.store_state(base, counted, state.token, self._steps.dump(held.master)):
            raise LostClaim(f"version {state.token} has been succeeded meanwhile")
        return held

    def _again(self, one: tuple[str, int], bucket: int, token: Token) -> Vector:
        values = self._gatherer.again(one, bucket)
        if values is None:
            raise LostClaim(f"the state of version {token} has been stored meanwhile")
        return values


def contradiction(state: RoundState, own: Round, total: int) -> str | None:
    """What of a round cannot be of its job, whoever wrote it there; None where nothing is wrong. Pure.

    Args:
        own: the round from this version, by the job's plan.
        total: how many rounds the job has.
    """
    if state.status == "finished" and state.version < total:
        return f"its rounds are finished at version {state.version} of {total}"
    if state.version > total or (state.version == total and state.status in ("running", "paused")):
        return f"it is {state.status} at version {state.version} of {total}"
    if state.version < total and own.wanted is None:  # else what it begins with depends on what was counted
        found, expected = (state.first, state.count, state.needed), (own.first, own.count, own.needed)
        if found != expected:
            return f"the round of version {state.version} has first, count and needed {found} instead of {expected}"
    return None


def behind(base: str, current: Token) -> int:
    """How many versions before the current one an update was computed on."""
    return current.version - Token.parse(base).version
