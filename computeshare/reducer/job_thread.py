"""The thread that serves one job in a reducer process."""

import contextlib
import random
import threading
import traceback
from pathlib import Path

import structlog
from redis.exceptions import RedisError

from computeshare.errors import ComputeShareError, LostClaim
from computeshare.protocol.keys import GIVEN_UP
from computeshare.protocol.reducer_session import ReducerSession
from computeshare.queue.recipe_runner import RecipeRunner
from computeshare.reducer.job_reducer import JobReducer
from computeshare.reducer.round_handler import ROUND_POLL_S
from computeshare.runtime.log_lines import REMARK_EVERY_S, Seldom

OUTAGE_S = (0.5, 1.5)
"""After an outage the broker is tried again within a random time between these."""
log = structlog.get_logger()


class JobThread:
    """Serves one claimed job, so that no job waits for another's step.

    It ends when the job needs no reducer any more, when the claim is lost, or when `stop` is set.
    """

    def __init__(
        self,
        session: ReducerSession,
        artifacts: Path,
        bundles: Path,
        stop: threading.Event,
        recipes: RecipeRunner | None = None,
    ) -> None:
        self.session, self.stop = session, stop
        self.job = JobReducer(session, artifacts, bundles, recipes)
        self.holds_claim = True
        """Whether the process renews the claim."""
        self._remarks = Seldom(REMARK_EVERY_S)
        self._thread = threading.Thread(target=self._run, name=f"job {session.job_id}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        self._thread.join()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def lose(self) -> None:
        """End soon: the claim has expired, or the broker has lost it."""
        if self.holds_claim:
            log.warning("lost claim", job=self.session.job_id, reason="it ran out")
        self.holds_claim = False

    def _run(self) -> None:
        self.holds_claim = self._serve() and self.holds_claim
        self.job.close()  # while the claim is renewed: it finishes and announces the current checkpoint
        if self.holds_claim:
            self._give_up()

    def _serve(self) -> bool:
        """Advance the job until it needs no reducer any more; wait while the broker is away.

        Returns False if an outage leaves unknown whether a commit took place: the claim then has to expire, and the
        next reducer starts from the data in Redis.
        """
        patience_s = 0.0  # a job that was just claimed has waited
        while self.holds_claim and not self.stop.is_set():
            try:
                if not self._advance(patience_s):
                    return True
            except RedisError as error:
                tell_outage(self._remarks, error)
                if not self.job.is_looking:
                    return False
                self.stop.wait(random.uniform(*OUTAGE_S))
            patience_s = self.job.look_again_s
        return True

    def _advance(self, patience_s: float) -> bool:
        """Advance the job; False once it is over. An error fails this job only. Raises RedisError."""
        job, job_id = self.job, self.session.job_id
        try:
            if job.is_held:
                self.stop.wait(ROUND_POLL_S)
            return job.advance(patience_s)
        except LostClaim as lost:
            log.warning("lost claim", job=job_id, reason=str(lost))
        except RedisError:
            raise
        except ComputeShareError as error:
            log.error("job failed", job=job_id, error=str(error))
            job.fail(str(error), traceback.format_exc())
        except Exception as error:
            log.exception("job failed", job=job_id)
            job.fail(f"{type(error).__name__}: {error}", traceback.format_exc())
        return False

    def _give_up(self) -> None:
        """Give the claim up, so that another reducer can take it at once; if the broker is away, the claim expires."""
        self.holds_claim = False
        with contextlib.suppress(RedisError):
            self.session.renew(0)
            self.session.redis.incr(GIVEN_UP)


def tell_outage(remarks: Seldom, error: RedisError) -> None:
    """Log that the broker cannot be used; rate-limited."""
    remarks.tell(log.warning, "broker unreachable, or it refuses commands", type(error).__name__, error=str(error))
