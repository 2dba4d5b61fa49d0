"""Who chooses a job's codecs, when, and that a choice holds."""

import json
from pathlib import Path
from typing import Any

import pytest
from redis import Redis

from api.projection.events.handlers import apply
from api.projection.events.job_projection import JobProjection, JobState
from api.projection.events.parser import StreamEvent
from api.projection.rates import JobRates
from computeshare.checkpoints.store import Artifacts
from computeshare.codecs.measured_link import Coded, MeasuredLink
from computeshare.errors import LostClaim
from computeshare.jobspec.spec import JobSpec
from computeshare.protocol.reducer_session import ReducerSession
from computeshare.protocol.round_store import RoundStore
from computeshare.protocol.worker_session import WorkerSession
from computeshare.reducer import codec_choice
from computeshare.reducer.codec_choice import Decider, Undecided
from computeshare.reducer.codec_policy import choose_codecs
from computeshare.worker.seat.link_benchmark import link
from tests.support.rounds import events

SPEC = JobSpec.model_validate(
    {
        "dataset": "digits",
        "model": "mlp",
        "codec": "auto",
        "strategy": {"kind": "local", "inner_steps": 3, "replicas": 2},
        "epochs": 2,
        "workers": {"min": 2, "max": 3},
    }
)
MEASURED = MeasuredLink(
    compute_s=0.03,
    up_bytes_per_s=2_500_000,
    down_bytes_per_s=2_500_000,
    messages={
        name: Coded(size=size, encode_s=0.0001, decode_s=0.0001)
        for name, size in {"float32": 69_000, "float16": 35_000, "int8": 17_000, "topk": 400}.items()
    },
)


@pytest.fixture
def store(redis: Redis, job_id: str) -> RoundStore:
    store = RoundStore(redis, job_id)
    store.publish(SPEC.model_dump_json())
    return store


@pytest.fixture
def reducer(redis: Redis, store: RoundStore) -> ReducerSession:
    reducer = ReducerSession(redis, store.job_id, "first")
    assert reducer.claim("host", 1, 60_000)
    return reducer


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_choice, "GRACE_S", 0.0)


def report(store: RoundStore, worker: str, measured: str = MEASURED.model_dump_json()) -> None:
    store.redis.hset(store.keys.seats(), worker, f"seat of {worker}")
    WorkerSession(store.redis, store.job_id, worker, f"session of {worker}").report(measured)


def test_as_many_workers_measure_as_the_job_waits_for(reducer: ReducerSession, tmp_path: Path) -> None:
    decider = Decider(reducer, Artifacts(tmp_path, reducer.job_id))
    report(reducer, "a")
    report(reducer, "liar", '{"compute_s": -1}')
    with pytest.raises(Undecided):
        decider.decide(SPEC)
    assert reducer.spec() == SPEC.model_dump_json() and events(reducer, "chosen") == []
    report(reducer, "b")
    decided = decider.decide(SPEC)
    assert decided.codecs.up == "int8" and decided.plan.inner_steps > 3
    assert JobSpec.model_validate_json(reducer.spec() or "") == decided
    assert decider.decide(decided) is decided and len(events(reducer, "chosen")) == 1


def test_others_may_still_measure_for_a_while(
    reducer: ReducerSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codec_choice, "GRACE_S", 3600.0)
    decider = Decider(reducer, Artifacts(tmp_path, reducer.job_id))
    for worker in ("a", "b"):
        report(reducer, worker)
    with pytest.raises(Undecided):
        decider.decide(SPEC)
    report(reducer, "c")  # as many as the job takes
    assert decider.decide(SPEC).codec != "auto"


def test_a_choice_holds_whatever_the_broker_loses(reducer: ReducerSession, tmp_path: Path) -> None:
    artifacts = Artifacts(tmp_path, reducer.job_id)
    for worker in ("a", "b"):
        report(reducer, worker)
    first = Decider(reducer, artifacts).decide(SPEC)
    reducer.redis.delete(*(reducer.keys.measured(worker) for worker in ("a", "b")), reducer.keys.events())
    reducer.publish(SPEC.model_dump_json())  # by a control plane that has not heard of it
    report(reducer, "d", MEASURED.model_copy(update={"up_bytes_per_s": 1e12}).model_dump_json())
    assert Decider(reducer, artifacts).decide(SPEC) == first
    assert len(events(reducer, "chosen")) == 1  # for that control plane


def test_only_the_active_reducer_chooses(reducer: ReducerSession, tmp_path: Path) -> None:
    for worker in ("a", "b"):
        report(reducer, worker)
    assert reducer.renew(0)
    other = ReducerSession(reducer.redis, reducer.job_id, "other")
    assert other.claim("host", 2, 60_000)
    with pytest.raises(LostClaim):
        Decider(reducer, Artifacts(tmp_path, reducer.job_id)).decide(SPEC)
    assert reducer.spec() == SPEC.model_dump_json()


@pytest.mark.parametrize(
    ("bytes_per_s", "inner_state", "lag"), [(2_500_000, "restart", 0), (150_000, "restart", 1), (150_000, "kept", 1)]
)
def test_the_control_plane_takes_the_choice_over_once(
    bytes_per_s: float, inner_state: str, lag: int, reducer: ReducerSession, tmp_path: Path
) -> None:
    link = {"up_bytes_per_s": bytes_per_s, "down_bytes_per_s": bytes_per_s}
    strategy = {**SPEC.strategy.model_dump(), "inner_state": inner_state}
    spec = JobSpec.model_validate({**SPEC.model_dump(mode="json"), "micro_batch": 8, "strategy": strategy})
    for worker in ("a", "b"):
        report(reducer, worker, MEASURED.model_copy(update=link).model_dump_json())
    decided = Decider(reducer, Artifacts(tmp_path, reducer.job_id)).decide(spec)
    assert decided.strategy.lag == lag and bool(decided.strategy.early_steps) == (inner_state == "kept")
    (event,) = events(reducer, "chosen")
    columns: dict[str, Any] = {"spec": spec.model_dump_json(), "rounds_total": spec.rounds_total, "chosen": None}
    state = JobState(reducer.job_id, spec.plan, columns)
    apply(JobProjection(state, JobRates()), StreamEvent("1-0", "chosen", 0, event))
    assert JobSpec.model_validate_json(state["spec"]) == decided
    assert (state["rounds_total"], state.plan) == (decided.rounds_total, decided.plan)
    assert state["chosen"] == event["reason"]
    assert ("settle with a delay" in event["reason"]) == (lag == 1 and inner_state == "restart")
    later = event | {"codec": {"up": "bfloat16"}, "reason": "later"}
    apply(JobProjection(state, JobRates()), StreamEvent("2-0", "chosen", 0, later))
    assert JobSpec.model_validate_json(state["spec"]) == decided and state["chosen"] == event["reason"]
    assert json.loads(state["spec"])["codec"] == event["codec"]


@pytest.mark.parametrize("codec", ["auto", {"up": "bfloat16", "down": "float32"}], ids=["both", "precision alone"])
def test_the_precision_is_chosen_once_and_the_codecs_by_its_speed(
    store: RoundStore, reducer: ReducerSession, tmp_path: Path, codec: Any
) -> None:
    spec = JobSpec.model_validate({**SPEC.model_dump(mode="json"), "codec": codec, "precision": "auto"})
    store.publish(spec.model_dump_json())
    artifacts = Artifacts(tmp_path, reducer.job_id)
    report(reducer, "a")  # of a job that left only its codecs open
    for worker, half_s in (("b", 0.001), ("c", 0.03)):
        seconds = {"precisions": {"float32": 0.06, "bfloat16": half_s}}
        report(reducer, worker, MEASURED.model_copy(update=seconds).model_dump_json())
    decided = Decider(reducer, artifacts).decide(spec)
    assert (decided.precision, decided.is_open) == ("bfloat16", False)
    assert Decider(reducer, artifacts).decide(spec) == decided
    in_bfloat16, in_float32 = (
        choose_codecs(spec, [MEASURED.model_copy(update={"compute_s": one}) for one in seconds]).inner_steps
        for seconds in ((0.001, 0.03), (0.06, 0.06))
    )
    if codec == "auto":
        assert decided.plan.inner_steps == in_bfloat16 != in_float32
    else:
        assert (decided.codec, decided.plan.inner_steps) == (spec.codec, 3)
    columns: dict[str, Any] = {"spec": spec.model_dump_json(), "rounds_total": spec.rounds_total, "chosen": None}
    state = JobState(reducer.job_id, spec.plan, columns)
    apply(JobProjection(state, JobRates()), StreamEvent("1-0", "chosen", 0, events(reducer, "chosen")[0]))
    assert JobSpec.model_validate_json(state["spec"]) == decided
    assert state["chosen"].startswith("bfloat16, because the slowest worker takes 60 ms for a micro-batch in float32")


def test_a_link_is_measured_both_ways_and_nothing_is_left_behind(reducer: ReducerSession) -> None:
    session = WorkerSession(reducer.redis, reducer.job_id, "a", "s")
    up, down = link(session)
    assert up > 1e6 and down > 1e6
    assert not reducer.redis.exists(reducer.keys.probe("s"))
