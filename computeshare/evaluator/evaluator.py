"""Scores each checkpoint on the test set, or on the validation split of a job that has one; of such a job also the best
version and the last on the test set, at the end.
"""

import contextlib
import random
import threading
import time
import uuid
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import structlog
from pydantic import ValidationError
from redis import Redis
from redis.exceptions import RedisError

from computeshare.bundles.store import BundleStore
from computeshare.checkpoints.part_score import PartScore, ScoredPart, document_of
from computeshare.checkpoints.store import Artifacts
from computeshare.errors import (
    ArtifactError,
    ComputeShareError,
    LostClaim,
    RecipeError,
    RecipeUnfit,
    ScorerGone,
    ShapeError,
)
from computeshare.evaluator.order import Due, best_of, in_turn
from computeshare.jobspec.early_stop import Stop
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol import handshake
from computeshare.protocol.keys import EVALUATOR, RECIPE_EVALUATOR, JobKeys
from computeshare.protocol.round_store import RoundStore, published_jobs
from computeshare.protocol.scripts import Scripts
from computeshare.runtime.log_lines import REMARK_EVERY_S, Seldom
from computeshare.types import Token

if TYPE_CHECKING:
    from computeshare.queue.recipe_runner import RecipeRunner

CLAIM_MS = 10_000
RENEW_S = 2.0
SET_ASIDE_S = 60.0
"""How long a checkpoint that could not be scored waits for its next try."""
LOOK_S = 0.5
RECIPE_FAILURES = 3
"""How often a recipe's code may fail in scoring, without a score in between, before its job is given up."""
LONGEST = 250
"""Most characters of a failure in the sentence that ends its job."""
log = structlog.get_logger()


class ArtifactScorer(Protocol):
    """Scores the checkpoints of one job, here or elsewhere."""

    def score(self, artifacts: Artifacts, token: Token, part: ScoredPart) -> PartScore:
        """The score of a checkpoint on a part of the data.

        Raises: ArtifactError, ShapeError: the checkpoint is damaged; ScorerGone; ComputeShareError.
        """

    def close(self) -> None:
        """Give up what it holds."""


@dataclass(frozen=True)
class ForJob:
    """The only job that an evaluator scores, in the name of `holder`, and what scores it."""

    job_id: str
    holder: str
    scorer: ArtifactScorer


@dataclass
class EvaluatorMemory:
    """Facts that evaluators in one process remember about their jobs; threads may share this object."""

    announced: set[Due] = field(default_factory=set)
    """Also checkpoints that were announced as damaged."""
    set_aside: dict[Due, float] = field(default_factory=dict)
    told: dict[str, str] = field(default_factory=dict)
    """The error in scoring that each job was last told."""
    failures: dict[str, int] = field(default_factory=dict)
    """How often each job's recipe has failed since its last score."""

    def done(self) -> set[Due]:
        """Checkpoints that are not to be scored now."""
        now = time.monotonic()
        for due, until in list(self.set_aside.items()):
            if until <= now:
                self.set_aside.pop(due, None)
        return {*list(self.announced), *list(self.set_aside)}

    def keep_only(self, job_ids: Collection[str]) -> None:
        """Forget all other jobs."""
        self.announced -= {due for due in list(self.announced) if due[0] not in job_ids}
        for kept in (self.told, self.failures):
            for job_id in list(kept):
                if job_id not in job_ids:
                    kept.pop(job_id, None)


class Evaluator:
    """Scores the checkpoints that jobs ask for; any number of evaluators may run."""

    def __init__(
        self,
        redis: Redis,
        artifacts: Path,
        data_dir: Path,
        stop: threading.Event,
        recipes: "RecipeRunner | None" = None,
        bundles: BundleStore | None = None,
        only: ForJob | None = None,
        memory: EvaluatorMemory | None = None,
    ) -> None:
        """`recipes`: None: leave jobs that train a recipe to other evaluators. `bundles`: with users' data sets.
        `only`: score one job, elsewhere; None: all jobs, in this process. `memory`: shared with others.
        """
        self.bundles, self._only, self._memory = bundles, only, memory or EvaluatorMemory()
        self.redis, self.root, self.data_dir, self.stop, self.recipes = redis, artifacts, data_dir, stop, recipes
        self.id = only.holder if only else uuid.uuid4().hex
        self._scripts = Scripts(redis)
        self._claimed: tuple[JobKeys, str] | None = None
        self._served: dict[str, int] = {}
        self._turns = 0
        self._specs: dict[str, JobSpec | None] = {}
        self._scorers: dict[str, ArtifactScorer] = {}
        """By job; at most one, that of the job scored last."""
        self._remarks = Seldom(REMARK_EVERY_S)

    def run(self) -> None:
        """Score checkpoints until `stop` is set; retry while the broker is away. Raises ScorerGone."""
        threading.Thread(target=self._stay_known, name="alive", daemon=True).start()
        try:
            self._score_all()
        finally:
            self._give_up_scorers()

    def _score_all(self) -> None:
        while not self.stop.is_set():
            try:
                if not self._turn():
                    self.stop.wait(LOOK_S)
            except RedisError as error:
                kind = type(error).__name__
                self._remarks.tell(log.warning, "broker unreachable, or it refuses commands", kind, error=str(error))
                self.stop.wait(random.uniform(0.5, 1.5))

    def _stay_known(self) -> None:
        """Keep renewing the keys that show a live evaluator, and the claim on the checkpoint being scored."""
        while True:
            with contextlib.suppress(RedisError):  # full or away: the next time
                if not self._only:
                    self.redis.set(EVALUATOR, self.id, px=CLAIM_MS)
                if self.recipes:
                    self.redis.set(RECIPE_EVALUATOR, self.id, px=CLAIM_MS)
                if claimed := self._claimed:
                    job, key = claimed
                    self._scripts.call("renew", job, claim_key=key, holder=self.id, life_ms=CLAIM_MS)
            if self.stop.wait(RENEW_S):
                return

    def _turn(self) -> bool:
        """Score one checkpoint, or announce a stored score again in case its event was lost; False if none is due."""
        handshake.check(self.redis, "evaluator")
        jobs = published_jobs(self.redis)
        if self._only:
            jobs = [job_id for job_id in jobs if job_id == self._only.job_id]
        else:
            self._memory.keep_only(jobs)
        waiting, last = self._waiting(jobs)
        stopping = {job_id for job_id in waiting if (spec := self._specs[job_id]) and spec.stop}
        for job_id, token in in_turn(waiting, last, self._served, stopping):
            spec = self._specs[job_id]
            if spec and self._settle(Artifacts(self.root, job_id), job_id, spec, token):
                self._turns += 1
                self._served[job_id] = self._turns
                return True
        return False

    def _waiting(self, job_ids: Sequence[str]) -> tuple[dict[str, list[Token]], dict[str, int]]:
        """The checkpoints to score or to announce, and the number of the last version, both by job."""
        done = self._memory.done()
        specs = {job_id: spec for job_id in job_ids if (spec := self._spec(job_id))}
        waiting: dict[str, list[Token]] = {}
        for job_id, spec in specs.items():
            artifacts = Artifacts(self.root, job_id)
            tokens = [token for token in artifacts.tokens() if spec.wants_score(token.version)]
            if spec.validation:
                tokens = self._last_after_others(artifacts, job_id, spec, tokens)
            waiting[job_id] = [token for token in tokens if (job_id, token) not in done]
        return waiting, {job_id: spec.rounds_total for job_id, spec in specs.items()}

    def _last_after_others(self, artifacts: Artifacts, job_id: str, spec: JobSpec, tokens: list[Token]) -> list[Token]:
        """The checkpoints without the last version's while others have no score: the best is not known before."""
        others = [token for token in tokens if token.version != spec.rounds_total]
        if len(others) == len(tokens):
            return tokens
        settled = (artifacts.score(token) or (job_id, token) in self._memory.announced for token in others)
        return tokens if all(settled) else others

    def _spec(self, job_id: str) -> JobSpec | None:
        if job_id not in self._specs and (raw := RoundStore(self.redis, job_id).spec()):
            try:
                spec = JobSpec.model_validate_json(raw)
                if spec.is_open:
                    return None  # the codec is not chosen yet, and with it the number of rounds
                self._specs[job_id] = spec if self.recipes or self._only or not spec.recipe else None
            except ValidationError as error:  # for example of another release: the other jobs can be scored
                log.error("cannot read the specification", job=job_id, error=str(error))
                self._specs[job_id] = None
        return self._specs.get(job_id)

    def _settle(self, artifacts: Artifacts, job_id: str, spec: JobSpec, token: Token) -> bool:
        """Score a checkpoint and announce the score; False if scoring failed or another evaluator has the claim."""
        rounds, due = RoundStore(self.redis, job_id), (job_id, token)
        score = artifacts.score(token)
        if score is None and not self._claim(rounds, token):
            return False
        try:
            score = score or self._score(artifacts, rounds, spec, token)
            _announce(rounds, token, score)
            self._memory.announced.add(due)
            if spec.stop:
                self._stop_early(artifacts, rounds, spec, spec.stop)
        except LostClaim as error:
            log.info("another has scored it", job=job_id, token=str(token), error=str(error))
            return False
        except (RedisError, ScorerGone):
            self._memory.announced.discard(due)
            self._release()
            raise
        except Exception as error:  # data set, disk, a job deleted meanwhile: other checkpoints can be scored
            self._memory.announced.discard(due)
            self._pass_over(rounds, spec, token, error)
            self._release()
            return False
        finally:
            self._claimed = None
        self._memory.failures.pop(job_id, None)
        return True

    def _claim(self, rounds: RoundStore, token: Token) -> bool:
        """Claim a checkpoint; False if another evaluator has the claim. It is renewed until it is given up."""
        claim = rounds.keys.scoring(str(token))
        if not self.redis.set(claim, self.id, nx=True, px=CLAIM_MS):
            self.redis.pexpire(claim, CLAIM_MS, lt=True)  # the broker's clock may have been set back
            return False
        self._claimed = rounds.keys, claim
        return True

    def _release(self) -> None:
        """Give the claim up, so that another need not wait for its end."""
        if claimed := self._claimed:
            job, key = claimed
            with contextlib.suppress(RedisError):  # away: it expires
                self._scripts.call("renew", job, claim_key=key, holder=self.id, life_ms=0)

    def _require_claim(self) -> None:
        """Renew the claim on the checkpoint being scored, or claim it again if nobody has it by now. Raises LostClaim:
        another evaluator has.
        """
        if claimed := self._claimed:
            job, key = claimed
            if self.redis.set(key, self.id, nx=True, px=CLAIM_MS):
                return
            if not self._scripts.call("renew", job, claim_key=key, holder=self.id, life_ms=CLAIM_MS):
                raise LostClaim("the claim on the checkpoint ended before its score came")

    def _stop_early(self, artifacts: Artifacts, rounds: RoundStore, spec: JobSpec, stop: Stop) -> None:
        """Announce the version with which the job is complete before its last, if the scores up to some version say so;
        versions above one that is still to be scored do not count yet.
        """
        scored: dict[int, Token] = {}
        scores: dict[int, dict[str, Any]] = {}
        for token in filter(lambda one: spec.wants_score(one.version), artifacts.tokens()):
            score = artifacts.score(token)
            if score is None and (rounds.job_id, token) not in self._memory.announced:  # else it is damaged
                break
            if score is not None:
                scored[token.version], scores[token.version] = token, score
        found = stop.decide(scores, spec.evaluate_every)
        if found is None or found[0] == spec.rounds_total:
            return
        version, reason = found
        if spec.validation:
            best = best_of({scored[each]: scores[each] for each in scored if each <= version})
            for token in dict.fromkeys((best, scored[version])):
                self._test(artifacts, rounds, spec, token)
        rounds.append("stopped", {"token": str(scored[version]), "version": version, "reason": reason})

    def _test(self, artifacts: Artifacts, rounds: RoundStore, spec: JobSpec, token: Token) -> None:
        """Score a scored checkpoint on the test set too, and announce it; one damaged or removed by now is left out."""
        score = artifacts.score(token) or {}
        try:
            if "test" not in score:
                score["test"] = self._scored(artifacts, spec, token, "test")
                artifacts.save_score(token, score)
        except (ArtifactError, ShapeError, OSError) as error:
            log.error("cannot score on the test set", job=rounds.job_id, token=str(token), error=str(error))
            return
        _announce(rounds, token, score)

    def _pass_over(self, rounds: RoundStore, spec: JobSpec, token: Token, error: Exception) -> None:
        """Set a checkpoint aside to try again later. An unreadable checkpoint other than the last version's is reported
        as damaged, so that the job does not wait for its score; another error is told to the job once.
        """
        reason = f"{type(error).__name__}: {error}"
        log.error("cannot score", job=rounds.job_id, token=str(token), error=reason)
        self._give_up_scorers()
        memory, job_id = self._memory, rounds.job_id
        memory.set_aside[job_id, token] = time.monotonic() + SET_ASIDE_S
        if isinstance(error, ArtifactError | ShapeError) and token.version < spec.rounds_total:
            if _is_for_good(error):
                with contextlib.suppress(OSError):  # read-only, full, or removed by now
                    Artifacts(self.root, job_id).mark_damaged(token)
            rounds.append("damaged", {"token": str(token), "version": token.version, "error": str(error)})
            memory.announced.add((job_id, token))
        elif memory.told.get(job_id) != reason:
            memory.told[job_id] = reason
            told = str(error) if isinstance(error, ComputeShareError) else reason
            rounds.append("unscored", {"version": token.version, "error": told})
        if isinstance(error, RecipeError) and not isinstance(error, RecipeUnfit):
            self._count_failure(rounds, error)

    def _count_failure(self, rounds: RoundStore, error: RecipeError) -> None:
        """Fail a job whose recipe's code has failed too often in scoring."""
        failures = self._memory.failures
        failures[rounds.job_id] = failures.get(rounds.job_id, 0) + 1
        if failures[rounds.job_id] >= RECIPE_FAILURES:
            why = (
                f"The recipe failed {RECIPE_FAILURES} times where versions are scored, last on "
                f"{str(error)[:LONGEST].rstrip('.')}. Mend it, try it by `computeshare recipes check --confined`, and "
                "create the job again or fork this one with the mended recipe"
            )
            rounds.append("failed", {"error": why, "detail": ""})

    def _score(self, artifacts: Artifacts, rounds: RoundStore, spec: JobSpec, token: Token) -> dict[str, Any]:
        scored = self._scored(artifacts, spec, token, spec.scored_part)
        told = {name: scored[name] for name in ("accuracy", "own_metrics") if name in scored}
        if spec.validation and token.version == spec.rounds_total:
            scores = {each: score for each in artifacts.tokens() if (score := artifacts.score(each))}
            if (best := best_of(scores | {token: scored})) != token:
                self._test(artifacts, rounds, spec, best)
            scored["test"] = self._scored(artifacts, spec, token, "test")
        artifacts.save_score(token, scored)
        log.info("scored", job=rounds.job_id, version=token.version, **told)
        return scored

    def _scored(self, artifacts: Artifacts, spec: JobSpec, token: Token, part: ScoredPart) -> dict[str, Any]:
        """The score of a checkpoint on a part of the data, as `score.json` holds it; stores a classifier's counts by
        class. Raises LostClaim, and as `ArtifactScorer.score`.
        """
        try:
            result = self._scorer(artifacts.folder.name, spec).score(artifacts, token, part)
        except RecipeError as error:
            raise type(error)(f"the {part} split: {error}") from error
        self._require_claim()
        if result.classes:
            artifacts.save_classes(token, part, result.classes.model_dump())
        return document_of(result, spec.facts.metric)

    def _scorer(self, job_id: str, spec: JobSpec) -> ArtifactScorer:
        """The scorer of the job, kept until another job's scorer is asked for."""
        if self._only:
            return self._only.scorer
        from computeshare.checkpoints.scorers import CheckpointScorer, LocalScorer
        from computeshare.training.recipe_process.process import RecipeProcess

        if job_id not in self._scorers:
            self._give_up_scorers()
            if spec.recipe:
                assert self.recipes, "others' jobs are not looked at"
                recipe = self.recipes.start(RecipeProcess, self.redis, job_id, spec, spec.scored_part)
                self._scorers[job_id] = CheckpointScorer(spec, recipe)
            else:
                self._scorers[job_id] = CheckpointScorer(spec, LocalScorer(spec, self.data_dir, self.bundles))
        return self._scorers[job_id]

    def _give_up_scorers(self) -> None:
        while self._scorers:
            self._scorers.popitem()[1].close()


def _is_for_good(error: Exception) -> bool:
    """Whether a checkpoint's files are damaged, and not out of reach for a moment, or of another form than this release
    expects.
    """
    cause = error.__cause__
    return isinstance(error, ArtifactError) and (not isinstance(cause, OSError) or isinstance(cause, FileNotFoundError))


def _announce(rounds: RoundStore, token: Token, score: Mapping[str, Any]) -> None:
    rounds.append("scored", {"token": str(token), "version": token.version, **score})
