"""The evaluator process: scores each checkpoint on the test set, or on the validation split of a job that has one; of
such a job also the best version and the last on the test set, at the end.
"""

import contextlib
import os
import random
import threading
import time
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import structlog
import typer
from pydantic import ValidationError
from redis import Redis
from redis.exceptions import RedisError

from computeshare.bundles.store import BundleStore
from computeshare.checkpoints.store import Artifacts, Tensors
from computeshare.errors import ArtifactError, ComputeShareError, SettingsError, ShapeError, SpecError
from computeshare.evaluator.text_server import serve_texts
from computeshare.jobspec.early_stop import Stop
from computeshare.jobspec.spec import JobSpec
from computeshare.jobspec.tasks.facts import Metric, goodness
from computeshare.protocol import handshake
from computeshare.protocol.job_log import JobLog
from computeshare.protocol.keys import EVALUATOR, RECIPE_EVALUATOR, JobKeys
from computeshare.protocol.round_store import RoundStore, published_jobs
from computeshare.protocol.scripts import Scripts
from computeshare.runtime.log_lines import REMARK_EVERY_S, Seldom, Writer
from computeshare.runtime.processes import configure_logging, end_soon_after, exit_with_parent, hostname, stop_event
from computeshare.settings import Settings
from computeshare.terminal.command import Version, run_command
from computeshare.transport.connections import connect
from computeshare.types import Token

if TYPE_CHECKING:
    from computeshare.evaluator.scorers import RecipeRunner, Scorer
    from computeshare.tasks.base import Part
    from computeshare.tasks.metrics import SplitScore

CLAIM_MS = 10_000
RENEW_S = 2.0
SET_ASIDE_S = 60.0
"""How long a checkpoint that could not be scored waits for its next try."""
LOOK_S = 0.5

Due = tuple[str, Token]
"""A job's id and the token of one of its checkpoints."""
log = structlog.get_logger()


def in_turn(
    waiting: Mapping[str, Collection[Token]],
    last: Mapping[str, int],
    served: Mapping[str, int],
    oldest_first: Collection[str] = (),
) -> Iterator[Due]:
    """The order in which to score checkpoints. Pure.

    Jobs whose last version waits come first, then the jobs served longest ago. In each pass over the jobs, each job
    gets one checkpoint scored: the newest, or the oldest where early stopping needs the scores in order.

    Args:
        waiting: checkpoints without a score, by job.
        last: the number of each job's last version.
        served: a number for each job that grows with the time it was last served; jobs never served are missing.
        oldest_first: the jobs whose oldest checkpoint comes first.
    """
    queues = {
        job: sorted(tokens, key=_newness, reverse=job not in oldest_first) for job, tokens in waiting.items() if tokens
    }

    def urgency(job: str) -> tuple[bool, int]:
        return max(token.version for token in queues[job]) < last[job], served.get(job, -1)

    jobs = sorted(queues, key=urgency)
    for turn in range(max(map(len, queues.values()), default=0)):
        for job in jobs:
            if turn < len(queues[job]):
                yield job, queues[job][turn]


def _newness(token: Token) -> tuple[int, int]:
    return token.version, token.incarnation


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
    ) -> None:
        """`recipes`: None: leave jobs that train a recipe to other evaluators. `bundles`: with users' data sets."""
        self.bundles = bundles
        self.redis, self.root, self.data_dir, self.stop, self.recipes = redis, artifacts, data_dir, stop, recipes
        self.id = uuid.uuid4().hex
        self._scripts = Scripts(redis)
        self._claimed: tuple[JobKeys, str] | None = None
        self._announced: set[Due] = set()
        self._set_aside: dict[Due, float] = {}
        self._served: dict[str, int] = {}
        self._turns = 0
        self._specs: dict[str, JobSpec | None] = {}
        self._told: dict[str, str] = {}
        """The error in scoring that each job was last told."""
        self._scorers: dict[str, Scorer] = {}
        """By job; at most one, that of the job scored last."""
        self._remarks = Seldom(REMARK_EVERY_S)

    def run(self) -> None:
        """Score checkpoints until `stop` is set; retry while the broker is away."""
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
        waiting, last = self._waiting(published_jobs(self.redis))
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
        self._announced = {due for due in self._announced if due[0] in job_ids}
        self._told = {job_id: error for job_id, error in self._told.items() if job_id in job_ids}
        self._set_aside = {due: until for due, until in self._set_aside.items() if until > time.monotonic()}
        done = self._announced | self._set_aside.keys()
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
        settled = (artifacts.score(token) or (job_id, token) in self._announced for token in others)
        return tokens if all(settled) else others

    def _spec(self, job_id: str) -> JobSpec | None:
        if job_id not in self._specs and (raw := RoundStore(self.redis, job_id).spec()):
            try:
                spec = JobSpec.model_validate_json(raw)
                if spec.is_open:
                    return None  # the codec is not chosen yet, and with it the number of rounds
                self._specs[job_id] = spec if self.recipes or not spec.recipe else None
            except ValidationError as error:  # for example of another release: the other jobs can be scored
                log.error("cannot read the specification", job=job_id, error=str(error))
                self._specs[job_id] = None
        return self._specs.get(job_id)

    def _settle(self, artifacts: Artifacts, job_id: str, spec: JobSpec, token: Token) -> bool:
        """Score a checkpoint and announce the score; False if scoring failed or another evaluator has the claim."""
        rounds = RoundStore(self.redis, job_id)
        score = artifacts.score(token)
        if score is None:
            claim = rounds.keys.scoring(str(token))
            if not self.redis.set(claim, self.id, nx=True, px=CLAIM_MS):
                self.redis.pexpire(claim, CLAIM_MS, lt=True)  # the broker's clock may have been set back
                return False
            self._claimed = rounds.keys, claim
            try:
                score = self._score(artifacts, rounds, spec, token)
            except Exception as error:  # data set, disk, a job deleted meanwhile: other checkpoints can be scored
                self._pass_over(rounds, spec, token, error)
                return False
            finally:
                self._claimed = None
        _announce(rounds, token, score)
        self._announced.add((job_id, token))
        if spec.stop:
            self._stop_early(artifacts, rounds, spec, spec.stop)
        return True

    def _stop_early(self, artifacts: Artifacts, rounds: RoundStore, spec: JobSpec, stop: Stop) -> None:
        """Announce the version with which the job is complete before its last, if the scores up to some version say so;
        versions above one that is still to be scored do not count yet.
        """
        scored: dict[int, Token] = {}
        scores: dict[int, dict[str, Any]] = {}
        for token in filter(lambda one: spec.wants_score(one.version), artifacts.tokens()):
            score = artifacts.score(token)
            if score is None and (rounds.job_id, token) not in self._announced:  # else it is damaged
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
                tensors = artifacts.tensors(token, averaged=True)
                score["test"] = self._scored(artifacts, spec, token, "test", tensors)
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
        self._set_aside[rounds.job_id, token] = time.monotonic() + SET_ASIDE_S
        if isinstance(error, ArtifactError | ShapeError) and token.version < spec.rounds_total:
            rounds.append("damaged", {"token": str(token), "version": token.version, "error": str(error)})
            self._announced.add((rounds.job_id, token))
        elif self._told.get(rounds.job_id) != reason:
            self._told[rounds.job_id] = reason
            told = str(error) if isinstance(error, ComputeShareError) else reason
            rounds.append("unscored", {"version": token.version, "error": told})

    def _score(self, artifacts: Artifacts, rounds: RoundStore, spec: JobSpec, token: Token) -> dict[str, Any]:
        tensors = artifacts.tensors(token, averaged=True)
        scored = self._scored(artifacts, spec, token, spec.scored_part, tensors)
        told = {name: scored[name] for name in ("accuracy", "own_metrics") if name in scored}
        try:
            if (sample := self._scorer(rounds.job_id, spec).sample()) is not None:
                scored["sample"] = sample
        except Exception as error:  # weights that are not finite, for example: the score stands all the same
            log.warning("no sample", job=rounds.job_id, version=token.version, error=str(error))
        if spec.validation and token.version == spec.rounds_total:
            scores = {each: score for each in artifacts.tokens() if (score := artifacts.score(each))}
            if (best := best_of(scores | {token: scored})) != token:
                self._test(artifacts, rounds, spec, best)
            scored["test"] = self._scored(artifacts, spec, token, "test", tensors)
        artifacts.save_score(token, scored)
        log.info("scored", job=rounds.job_id, version=token.version, **told)
        return scored

    def _scored(
        self, artifacts: Artifacts, spec: JobSpec, token: Token, part: "Part", tensors: Tensors
    ) -> dict[str, Any]:
        """The score of a version's state dict on a part of the data, as `score.json` holds it; stores a classifier's
        counts by class.
        """
        scorer = self._scorer(artifacts.folder.name, spec)
        if scorer.frozen != artifacts.manifest(token).frozen:
            raise SpecError(
                "the parameters that are not trained are built by every machine, and this one builds others than the "
                "job's: install the same version of torch as where the job began, and the same files"
            )
        result = scorer.score(part, scorer.layout.gather(tensors), spec.eval_batch)
        if result.classes:
            artifacts.save_classes(token, part, result.classes.model_dump())
        return document_of(result, spec.facts.metric)

    def _scorer(self, job_id: str, spec: JobSpec) -> "Scorer":
        """What scores the job, kept until another job's is asked for."""
        from computeshare.evaluator.scorers import LocalScorer

        if job_id not in self._scorers:
            self._give_up_scorers()
            if spec.recipe:
                assert self.recipes, "others' jobs are not looked at"
                self._scorers[job_id] = self.recipes.scorer(self.redis, job_id, spec)
            else:
                self._scorers[job_id] = LocalScorer(spec, self.data_dir, self.bundles)
        return self._scorers[job_id]

    def _give_up_scorers(self) -> None:
        while self._scorers:
            self._scorers.popitem()[1].close()


def best_of(scores: Mapping[Token, Mapping[str, Any]]) -> Token:
    """The checkpoint with the best score; of equally good ones the earliest. Pure."""
    return max(scores, key=lambda token: (goodness(scores[token]), -token.version))


def document_of(score: "SplitScore", metric: Metric) -> dict[str, Any]:
    """A score as `score.json` and the event hold it: versions are compared by `accuracy`, else by `loss`. Pure.

    Args:
        metric: by which the job's versions are compared.
    """
    own = dict(score.metrics)
    compared = {"accuracy": own.pop("accuracy")} if metric == "accuracy" else {}
    found = {"loss": score.loss, **compared, "samples": score.samples}
    return found | ({"own_metrics": own} if own else {})


def _announce(rounds: RoundStore, token: Token, score: Mapping[str, Any]) -> None:
    rounds.append("scored", {"token": str(token), "version": token.version, **score})


def _recipes(settings: Settings) -> "RecipeRunner | None":
    """How recipes are run here; None: they are not. Raises SettingsError: nothing here could check their signatures."""
    if not settings.recipes:
        return None
    from computeshare.evaluator.scorers import RecipeRunner

    if not (key := settings.resolve_control_key()):
        where = settings.control_key_path
        raise SettingsError(f"no key of the control plane: set COMPUTESHARE_CONTROL_KEY, or let {where} hold it")
    return RecipeRunner(BundleStore(settings.bundles_dir), key, settings.unconfined, settings.step_limit)


def serve(settings: Settings) -> None:
    """Run one evaluator in this process until a signal ends it."""
    import torch

    stop = stop_event()
    end_soon_after(stop)
    url = settings.resolve_redis_url()
    with JobLog(url, Writer("evaluator", hostname())) as job_log:
        configure_logging(job_log.capture)
        os.nice(5)  # scoring can wait, training cannot
        torch.set_num_threads(1)
        redis = connect(url)
        log.info("evaluator ready", pid=os.getpid())
        bundles = BundleStore(settings.bundles_dir)
        texts = threading.Thread(target=serve_texts, args=(redis, settings.artifacts_dir, bundles, stop), daemon=True)
        texts.start()
        Evaluator(redis, settings.artifacts_dir, settings.data_dir, stop, _recipes(settings), bundles).run()


def child(values: dict[str, str]) -> None:
    """Entry point for `computeshare up`: `serve` in a process that ends with its parent."""
    os.environ.update(values)
    exit_with_parent()
    serve(Settings())


def command(
    redis_url: Annotated[str | None, typer.Option(help="Broker; default: the one of `computeshare up` here.")] = None,
    home: Annotated[Path | None, typer.Option(help="Folder of checkpoints and run.json.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder of data sets.")] = None,
    recipes: Annotated[
        bool | None, typer.Option("--recipes", help="Also score jobs that train recipes, whose code then runs here.")
    ] = None,
    version: Version = False,
) -> None:
    """Score every checkpoint on its job's test set."""
    serve(Settings.given(redis_url=redis_url, home=home, data=data, recipes=recipes))


def main() -> None:
    """The command `computeshare-evaluator`."""
    run_command(command)


if __name__ == "__main__":
    main()
