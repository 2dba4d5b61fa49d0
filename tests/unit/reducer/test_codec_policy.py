"""What is chosen for a job that leaves its codecs open, by links and speeds."""

import math
from typing import Any

import pytest

from computeshare.codecs.measured_link import Coded, MeasuredLink
from computeshare.jobspec.spec import CodecSpec, JobSpec
from computeshare.reducer.codec_policy import IDLE, MOST_STEPS, PLANNED, SENDING, choose_codecs

RESNET = 44_700_000
MESSAGES = {"float32": RESNET, "float16": RESNET // 2, "int8": RESNET // 4, "topk": RESNET // 190}


def measured(mbit_s: float, compute_s: float = 0.1, size: float = 1.0, coding_s: float = 0.0) -> MeasuredLink:
    messages = {
        name: Coded(size=int(size * count), encode_s=coding_s, decode_s=coding_s) for name, count in MESSAGES.items()
    }
    rate = mbit_s * 125_000
    return MeasuredLink(compute_s=compute_s, up_bytes_per_s=rate, down_bytes_per_s=rate, messages=messages)


def sync(**changes: Any) -> JobSpec:
    return JobSpec.model_validate({"dataset": "mnist", "model": "lenet5", "codec": "auto", **changes})


def local(inner_steps: int = 20, replicas: int = 2, **changes: Any) -> JobSpec:
    return sync(strategy={"kind": "local", "inner_steps": inner_steps, "replicas": replicas}, **changes)


@pytest.mark.parametrize(
    ("mbit_s", "size", "codec"),
    [
        (1500, 0.01, CodecSpec(up="float16", down="float32")),
        (1060, 0.01, CodecSpec(up="float16", down="float16")),
        (640, 0.01, CodecSpec(up="int8", down="int8")),
        (215, 0.01, CodecSpec(up="topk", down="int8")),
        (13, 0.01, CodecSpec(up="topk", down="topk")),
    ],
)
def test_the_thinner_the_link_the_fewer_bytes(mbit_s: float, size: float, codec: CodecSpec) -> None:
    choice = choose_codecs(sync(), [measured(mbit_s, 0.05, size)] * 2)
    assert (choice.codec, choice.inner_steps) == (codec, None)
    assert choice.sending <= PLANNED


@pytest.mark.parametrize(
    ("mbit_s", "codec"),
    [
        (130, CodecSpec(up="float16", down="float32")),
        (95, CodecSpec(up="float16", down="float16")),
        (50, CodecSpec(up="int8", down="int8")),
        (17, CodecSpec(up="topk", down="int8")),
    ],
)
def test_with_a_delay_ten_times_as_many_bytes_are_sent_while_computing(mbit_s: float, codec: CodecSpec) -> None:
    found = [choose_codecs(sync(strategy={"delay": delay}), [measured(mbit_s, 0.05, 0.01)] * 2) for delay in (0, 1)]
    assert found[1].codec == codec and found[1].sending <= PLANNED
    assert found[0].codec != codec


@pytest.mark.parametrize("coding_s", [0.0, 0.05, 0.5])
def test_with_a_delay_the_steps_that_hide_communication_are_enough(coding_s: float) -> None:
    strategy = {"kind": "local", "inner_steps": 1, "replicas": 2, "delay": 1}
    chosen = choose_codecs(sync(strategy=strategy), [measured(5, 0.1, coding_s=coding_s)] * 2)
    without = choose_codecs(local(1), [measured(5, 0.1, coding_s=coding_s)] * 2)
    assert chosen.sending <= PLANNED and chosen.inner_steps and without.inner_steps
    assert chosen.inner_steps < without.inner_steps or without.codec.up == "topk"


def test_a_low_rank_is_preferred_to_leaving_most_values_out_unless_a_worker_does_not_know_it() -> None:
    older = measured(13, 0.05, 0.01)
    low = {"lowrank4": older.messages["topk"], "lowrank2": older.messages["topk"]}
    newer = older.model_copy(update={"messages": {**older.messages, **low}})
    assert choose_codecs(sync(), [newer, newer]).codec == CodecSpec(up="lowrank4", down="lowrank4")
    assert choose_codecs(sync(), [newer, older]).codec == CodecSpec(up="topk", down="topk")


def test_the_worker_with_the_worst_link_for_its_speed_decides() -> None:
    fine, thin = measured(10_000, 0.05, 0.01), measured(20, 0.05, 0.01)
    assert choose_codecs(sync(), [fine, thin]).codec == choose_codecs(sync(), [thin, thin]).codec
    assert choose_codecs(sync(), [fine, thin]).slowest == thin
    slow_but_thin = measured(20, 5.0, 0.01)  # it computes for so long that its link is idle
    assert choose_codecs(sync(), [fine, slow_but_thin]).codec == CodecSpec(up="float16", down="float32")


def test_where_nothing_suffices_what_sends_least_is_taken_and_said() -> None:
    choice = choose_codecs(sync(), [measured(1, 0.001)])
    assert choice.codec == CodecSpec(up="topk", down="topk") and choice.sending > SENDING
    assert choice.reason.endswith("; no other choice takes less")


def test_replicas_take_as_many_steps_as_keep_the_link_free() -> None:
    choice = choose_codecs(local(), [measured(20, size=0.25)] * 2)
    assert choice.codec == CodecSpec(up="int8", down="int8") and choice.inner_steps is not None
    sending = 0.25 * 2 * MESSAGES["int8"] / 2.5e6
    assert sending / (sending + 0.1 * choice.inner_steps) <= PLANNED
    assert sending / (sending + 0.1 * 0.75 * choice.inner_steps) > PLANNED
    assert idle(choice.inner_steps, 2) <= IDLE < idle(425, 2)  # which would have sufficed
    assert "int8 up and int8 down and" in choice.reason and "20 Mbit/s" in choice.reason


def idle(steps: int, replicas: int) -> float:
    """Share of an epoch's time, 1,875 micro-batches, in which a replica has nothing to do."""
    plan = local(inner_steps=steps, replicas=replicas).plan
    rounds = [plan.round(version) for version in range(plan.rounds_per_epoch)]
    time = sum(max(len(plan.micro_batches(unit)) for unit in one.units) for one in rounds)
    return 1 - 1875 / (replicas * time)


def test_steps_with_which_an_epoch_is_made_of_whole_rounds_already_stay_as_they_are() -> None:
    needed = 0.6 * 2 * MESSAGES["int8"] * (1 / PLANNED - 1) / 0.1 / 125_000
    choice = choose_codecs(local(replicas=4), [measured(needed / 235, size=0.6)] * 4)
    assert choice.inner_steps in (235, 236) and idle(choice.inner_steps, 4) <= IDLE


def test_a_jobs_own_inner_steps_are_the_fewest() -> None:
    plenty = choose_codecs(local(inner_steps=400, epochs=1), [measured(100, size=0.3)] * 2)
    assert plenty.inner_steps == 400 and plenty.codec.up == "float16"  # which suffices with so many


def test_on_the_thinnest_links_replicas_leave_out_what_matters_least() -> None:
    choice = choose_codecs(local(), [measured(0.5)] * 2)
    assert choice.codec.up == "topk" and choice.inner_steps is not None and choice.inner_steps <= MOST_STEPS


def test_no_more_steps_than_an_epoch_has() -> None:
    spec = local(dataset="digits", model="mlp", inner_steps=2, replicas=4, micro_batch=32)
    choice = choose_codecs(spec, [measured(0.1)] * 4)
    assert choice.inner_steps == math.ceil(spec.plan.micro_batches_per_epoch / 4) == 12


def test_steps_that_no_epoch_divides_into_stay_as_they_are_needed() -> None:
    spec = local(dataset="digits", model="mlp", inner_steps=2, replicas=1, micro_batch=2)  # 719 in an epoch
    size = 48.35 * PLANNED / (1 - PLANNED) * 2.5e6 / (2 * MESSAGES["int8"])  # for what 483.5 steps take
    choice = choose_codecs(spec, [measured(20, size=size)])
    assert choice.inner_steps == 484 and choice.sending == pytest.approx(PLANNED, rel=0.01)


def test_a_worker_with_several_replicas_sends_for_each() -> None:
    alone, four = (
        choose_codecs(local(replicas=4), [measured(150)]),
        choose_codecs(local(replicas=4), [measured(150)] * 4),
    )
    assert alone.sending <= PLANNED and four.sending <= PLANNED
    assert alone.inner_steps is not None and four.inner_steps is not None and alone.inner_steps < four.inner_steps


def test_encoding_and_decoding_hold_workers_up_as_a_link_does() -> None:
    fast = measured(10_000, 1.0, 0.01)
    assert choose_codecs(sync(), [fast] * 2).sending < 0.001
    busy = choose_codecs(sync(), [measured(10_000, 1.0, 0.01, coding_s=0.01)] * 2)
    units = sync().plan.units_per_round
    coding = units / 2 + units + 1 + 2  # own updates; all at the reducer; the version there, and by both who read it
    assert busy.sending == pytest.approx(0.01 * coding / (units / 2 + 0.01 * coding), rel=0.02)


def test_replicas_take_more_steps_where_coding_takes_longer() -> None:
    free, busy = (choose_codecs(local(), [measured(20, size=0.1, coding_s=spent)] * 2) for spent in (0, 0.05))
    assert free.inner_steps is not None and busy.inner_steps is not None
    assert busy.codec == free.codec and busy.inner_steps > free.inner_steps and busy.sending <= PLANNED


def test_what_is_planned_leaves_room_for_what_varies() -> None:
    """ResNet-18 over 5 Mbit/s as measured: a tenth of slower links or faster machines still is within the promise."""
    coded = {
        "float32": (14.2, 0.06, 0.025),
        "float16": (7.6, 0.06, 0.03),
        "int8": (4.3, 0.05, 0.02),
        "topk": (0.24, 0.1, 0.02),
    }
    messages = {name: Coded(size=int(1e6 * mb), encode_s=up, decode_s=down) for name, (mb, up, down) in coded.items()}
    for rate, compute_s in ((600e3, 0.105), (540e3, 0.105), (600e3, 0.095)):
        one = MeasuredLink(compute_s=compute_s, up_bytes_per_s=rate, down_bytes_per_s=rate, messages=messages)
        choice = choose_codecs(local(20), [one] * 2)
        assert choice.codec == CodecSpec(up="topk", down="topk") and choice.inner_steps is not None
        assert choice.sending <= PLANNED < SENDING
        assert 60 < choice.inner_steps < MOST_STEPS / 2


def test_what_was_chosen_makes_a_whole_specification() -> None:
    spec = local(inner_steps=10, replicas=3)
    decided = spec.chosen(CodecSpec(up="int8", down="int8"), 50)
    assert decided.codecs == CodecSpec(up="int8", down="int8")
    assert (decided.micro_batches_per_round, decided.plan.inner_steps) == (150, 50)
    assert JobSpec.model_validate_json(decided.model_dump_json()) == decided
    assert sync().chosen(CodecSpec()).codecs == CodecSpec()
    with pytest.raises(ValueError, match="not been chosen yet"):
        _ = spec.codecs


@pytest.mark.parametrize("wrong", ["int8", 5, {"up": "auto"}, {"up": "int8", "more": 1}])
def test_a_codec_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="codec"):
        sync(codec=wrong)
