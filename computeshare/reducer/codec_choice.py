"""Chooses the codecs and inner steps of a job with `codec: auto`, once: waits for measurements, stores, publishes."""

import time
from dataclasses import asdict
from typing import Any

import structlog
from pydantic import ValidationError

from computeshare.checkpoints.store import Artifacts
from computeshare.codecs.measured_link import MeasuredLink
from computeshare.errors import LostClaim
from computeshare.jobspec.spec import CodecSpec, JobSpec
from computeshare.protocol.reducer_session import ReducerSession
from computeshare.reducer.codec_policy import Choice, choose

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
        """The specification with its codecs and inner steps chosen.

        A choice stored on disk holds, even if the broker has lost it. Raises Undecided, LostClaim, OSError.
        """
        if spec.codec != "auto":
            return spec
        choice = self._artifacts.choice()
        if choice is None:
            measured = self._measured()
            if not self._is_time(len(measured), spec):
                raise Undecided
            found = choose(spec, measured)
            choice = _told(found)
            log.info("chosen", job=self._session.job_id, reason=found.reason)
            self._artifacts.keep_choice(choice)
        decided = spec.chosen(CodecSpec.model_validate(choice["codec"]), choice["inner_steps"])
        if not self._session.announce("chosen", choice):
            raise LostClaim("another reducer has taken over, or the job is gone")
        self._session.publish(decided.model_dump_json())
        return decided

    def _measured(self) -> list[MeasuredLink]:
        found = []
        for worker, text in sorted(self._session.measured().items()):
            try:
                found.append(MeasuredLink.model_validate_json(text))
            except ValidationError as error:
                log.warning("measurement passed over", job=self._session.job_id, worker=worker, error=str(error))
        return found

    def _is_time(self, measured: int, spec: JobSpec) -> bool:
        if measured < spec.workers.min:
            self._enough_at = None
            return False
        self._enough_at = self._enough_at or time.monotonic()
        return measured >= spec.workers.max or time.monotonic() >= self._enough_at + GRACE_S


def _told(choice: Choice) -> dict[str, Any]:
    """A choice as a JSON object, for the event and the file."""
    told = asdict(choice) | {"codec": choice.codec.model_dump(), "slowest": choice.slowest.model_dump()}
    return told | {"reason": choice.reason}
