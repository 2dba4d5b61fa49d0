"""Chooses what a job leaves open (codecs, inner steps, delay, precision), once: waits for measurements, publishes."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import structlog
from pydantic import ValidationError

from computeshare.checkpoints.store import Artifacts
from computeshare.codecs.measured_link import MeasuredLink
from computeshare.errors import LostClaim
from computeshare.jobspec.spec import CodecSpec, JobSpec
from computeshare.protocol.reducer_session import ReducerSession
from computeshare.reducer.codec_policy import Choice, choose_codecs
from computeshare.reducer.precision_policy import choose_precision

GRACE_S = 2.0
"""How long other workers may still measure once `workers.min` have reported, in seconds."""
log = structlog.get_logger()


class Undecided(Exception):
    """Too few workers have reported their measurements yet."""


class Decider:
    """Makes one job's choice, for the reducer that is about to open the job."""

    def __init__(self, session: ReducerSession, artifacts: Artifacts) -> None:
        self._session, self._artifacts = session, artifacts
        self._enough_at: float | None = None

    def decide(self, spec: JobSpec) -> JobSpec:
        """The specification with codecs, inner steps, delay and precision chosen.

        A choice stored on disk holds, even if the broker has lost it. Raises Undecided, LostClaim, OSError.
        """
        if not spec.is_open:
            return spec
        choice = self._artifacts.choice()
        if choice is None:
            measured = self._measured(spec)
            if not self._is_time(len(measured), spec):
                raise Undecided
            choice = chosen_for(spec, measured)
            log.info("chosen", job=self._session.job_id, reason=choice["reason"])
            self._artifacts.keep_choice(choice)
        codec, delay = CodecSpec.model_validate(choice["codec"]), choice.get("delay", 0)
        decided = spec.chosen(codec, choice["inner_steps"], choice["precision"], delay)
        if not self._session.announce("chosen", choice):
            raise LostClaim("another reducer has taken over, or the job is gone")
        self._session.publish(decided.model_dump_json())
        return decided

    def _measured(self, spec: JobSpec) -> list[MeasuredLink]:
        found = []
        for worker, text in sorted(self._session.measured().items()):
            try:
                one = MeasuredLink.model_validate_json(text)
                found += [one] if one.precisions or spec.precision != "auto" else []
            except ValidationError as error:
                log.warning("measurement passed over", job=self._session.job_id, worker=worker, error=str(error))
        return found

    def _is_time(self, measured: int, spec: JobSpec) -> bool:
        if measured < spec.workers.min:
            self._enough_at = None
            return False
        self._enough_at = self._enough_at or time.monotonic()
        return measured >= spec.workers.max or time.monotonic() >= self._enough_at + GRACE_S


def chosen_for(spec: JobSpec, measured: Sequence[MeasuredLink]) -> dict[str, Any]:
    """The choice for a job from its workers' measurements (at least one), as JSON for the event and the file."""
    precision, reasons = None, []
    if spec.precision == "auto":
        precision, reason = choose_precision(measured)
        measured = [
            one.model_copy(update={"compute_s": one.precisions.get(precision, one.compute_s)}) for one in measured
        ]
        reasons.append(reason)
    choice: dict[str, Any] = {"precision": precision, "inner_steps": None}
    if spec.codec == "auto":
        found = choose_codecs(spec, measured)
        choice |= asdict(found) | {"codec": found.codec.model_dump(), "slowest": found.slowest.model_dump()}
        reasons += [found.reason, *_replaced(spec, found)]
    else:
        choice["codec"] = spec.codec.model_dump()
    return choice | {"reason": "; ".join(reasons)}


def _replaced(spec: JobSpec, found: Choice) -> list[str]:
    """What of the strategy a chosen delay replaces besides, in words."""
    before, after = (one.model_dump() for one in (spec.strategy, spec.strategy.chosen(None, found.delay)))
    told = {"delay", "overlap"}
    values = [f"{name} {value:g}" for name, value in after.items() if value != before[name] and name not in told]
    return [f"{' and '.join(values)}, since the job's own outer step does not settle with a delay"] if values else []
