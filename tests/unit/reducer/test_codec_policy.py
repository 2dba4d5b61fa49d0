"""What is chosen for a job that leaves its codecs open, by links and speeds."""

import math
from typing import Any

import pytest

from computeshare.codecs.measured_link import Coded, MeasuredLink
from computeshare.codecs.registry import CANDIDATES, CODECS, PAIRS
from computeshare.jobspec.memory_estimate import seat_bytes
from computeshare.jobspec.spec import CodecSpec, JobSpec
from computeshare.reducer.codec_choice import chosen_for
from computeshare.reducer.codec_policy import (
    DELAYED_STEPS,
    IDLE,
    MANY_STEPS,
    MOST_STEPS,
    PLANNED,
    SENDING,
    choose_codecs,
)

RESNET = 44_700_000
RATIOS = {
    "float32": 1,
    "float16": 2,
    "int8": 4,
    "int4": 10,
    "lowrank8": 80,
    "lowrank4": 160,
    "lowrank2": 300,
    "topk": 190,
    "lowrank1": 500,
}
"""How many times shorter than in float32 a large model's update is."""
MESSAGES = {name: RESNET // ratio for name, ratio in RATIOS.items()}
BOTH_WAYS = 2 * MESSAGES["int4"]
"""The bytes of the shortest pair of codecs without error feedback."""


def measured(mbit_s: float, compute_s: float = 0.1, size: float = 1.0, coding_s: float = 0.0) -> MeasuredLink:
    messages = {
        name: Coded(size=int(size * count), encode_s=coding_s, decode_s=coding_s) for name, count in MESSAGES.items()
    }
    rate = mbit_s * 125_000
    return MeasuredLink(compute_s=compute_s, up_bytes_per_s=rate, down_bytes_per_s=rate, messages=messages)


def sync(**changes: Any) -> JobSpec:
    return JobSpec.model_validate({"dataset": "mnist", "model": "lenet5", "codec": "auto", **changes})


def local(inner_steps: int = 20, replicas: int = 2, state: str = "restart", **changes: Any) -> JobSpec:
    strategy = {"kind": "local", "inner_steps": inner_steps, "replicas": replicas, "inner_state": state}
    return sync(strategy=strategy, **changes)


MODELS = {
    "lenet5": {"compute_s": 0.005, "size": 0.0055},
    "resnet18": {"compute_s": 0.1, "size": 1.0},
    "resnet18 on a GPU": {"compute_s": 0.005, "size": 1.0},
    "gpt, 350 M": {"compute_s": 2.0, "size": 31.0},
}
"""Seconds for a micro-batch, and bytes beside those of `RESNET`."""
LINKS = (2, 5, 10, 20, 50, 100, 200, 500, 1000)
"""In Mbit/s."""
SYNC = {
    "lenet5": "1/1 1/1 1/1 1/1 2/2 4/4 8/8 8/i4 i4/8",
    "resnet18": "1/1 1/1 1/1 1/1 1/1 1/1 1/1 4/4 8/8",
    "resnet18 on a GPU": "1/1 1/1 1/1 1/1 1/1 1/1 1/1 1/1 1/1",
    "gpt, 350 M": "1/1 1/1 1/1 1/1 1/1 1/1 1/1 1/1 4/4",
}
LOCAL = {
    "lenet5": "i4/i4x67d i4/i4x52d i8/i8x52d i4/i4x78 i4/i4x36 i4/i4x20 i8/i8x20 f16/f16x20 f16/f32x20",
    "resnet18": "8/8x52d 8/8x52d i4/i4x67d i4/i4x52d i8/i8x52d i4/i4x78 i4/i4x39 i4/i4x20 i8/i8x20",
    "resnet18 on a GPU": "1/1x134d 2/2x94d 4/4x85d 8/8x85d 8/8x52d 8/8x52d i4/i4x67d i4/i4x52d i8/i8x52d",
    "gpt, 350 M": "8/8x117d 8/8x52d 8/8x52d i4/i4x94d i4/i4x52d i8/i8x52d i4/i4x117 i4/i4x47 i4/i4x24",
}
KEPT = {
    "lenet5": "i4/i4x94-38 i4/i4x36-15 i4/i4x20-8 i4/i4x20-8 f16/f16x20-8 i4/i4x20 i8/i8x20 f16/f16x20 f16/f32x20",
    "resnet18": "8/8x55-22 8/8x24-10 i4/i4x94-38 i4/i4x47-19 i4/i4x20-8 i4/i4x20-8 i8/i8x20-8 i4/i4x20 i8/i8x20",
    "resnet18 on a GPU": "1/1x187-75 2/2x117-47 4/4x117-47 8/8x117-47 8/8x47-19 8/8x24-10 i4/i4x94-38 i4/i4x36-15 "
    "i4/i4x20-8",
    "gpt, 350 M": "4/4x78-32 8/8x67-27 8/8x36-15 i4/i4x134-54 i4/i4x52-21 i4/i4x26-11 i4/i4x20-8 i8/i8x20-8 "
    "f16/f32x20-8",
}
"""The choices for these links: the codecs up and down (a number: a low rank), the inner steps, and d with a delay or
the steps that overlap, where the inner state is kept. Of a ResNet-18, both ways at once (`JobSpec.has_drafts`).
"""


def told(codec: str) -> str:
    return codec.removeprefix("lowrank").replace("int", "i").replace("float", "f")


@pytest.mark.parametrize("model", MODELS)
def test_the_choice_for_links_from_2_to_1000_mbit(model: str) -> None:
    found, drafted = {}, {"model": "resnet18", "input": [3, 32, 32]} if model.startswith("resnet18") else {}
    for name, spec in (
        ("sync", sync(**drafted)),
        ("local", local(**drafted)),
        ("kept", local(state="kept", **drafted)),
    ):
        choices = [choose_codecs(spec, [measured(link, **MODELS[model])] * 2) for link in LINKS]
        hidden = [f"-{one.overlap}" if one.overlap else "d" * one.delay for one in choices]
        steps = [
            f"x{one.inner_steps}{how}" if one.inner_steps else "" for one, how in zip(choices, hidden, strict=True)
        ]
        pairs = [f"{told(one.codec.up)}/{told(one.codec.down)}" for one in choices]
        found[name] = " ".join(map("".join, zip(pairs, steps, strict=True)))
    assert found == {"sync": SYNC[model], "local": LOCAL[model], "kept": KEPT[model]}


@pytest.mark.parametrize("model", MODELS)
def test_what_sends_less_is_taken_only_where_no_less_lossy_pair_is_short_enough(model: str) -> None:
    for link in LINKS:
        one = measured(link, **MODELS[model])
        choice = choose_codecs(sync(), [one] * 2)
        lossier = list(CODECS)[: list(CODECS).index(choice.codec.up)]
        without = {name: coded for name, coded in one.messages.items() if name in lossier}
        if choice.codec.up != "float16" and without:
            less_lossy = choose_codecs(sync(), [one.model_copy(update={"messages": without})] * 2)
            assert less_lossy.sending > max(PLANNED, choice.sending)


@pytest.mark.parametrize("mbit_s", [2, 20, 200])
def test_with_a_delay_ten_times_as_many_bytes_are_sent_while_computing(mbit_s: float) -> None:
    model = MODELS["lenet5"]
    with_delay = choose_codecs(sync(strategy={"delay": 1}), [measured(mbit_s, **model)] * 2)
    without = choose_codecs(sync(), [measured(10 * mbit_s, **model)] * 2)
    assert with_delay.codec == without.codec and with_delay.sending <= PLANNED


@pytest.mark.parametrize("coding_s", [0.0, 0.05, 0.5])
def test_with_a_delay_the_steps_that_hide_communication_are_enough(coding_s: float) -> None:
    strategy = {"kind": "local", "inner_steps": 1, "replicas": 2, "delay": 1}
    chosen = choose_codecs(sync(strategy=strategy), [measured(5, 0.1, coding_s=coding_s)] * 2)
    without = choose_codecs(local(1), [measured(5, 0.1, coding_s=coding_s)] * 2)
    assert chosen.sending <= PLANNED and chosen.inner_steps and without.inner_steps
    assert chosen.inner_steps < without.inner_steps or CODECS[without.codec.up].residual


@pytest.mark.parametrize("delay", [0, 1])
def test_what_goes_up_and_down_at_once_takes_as_long_as_the_longer_way(delay: int) -> None:
    drafted = {"model": "resnet18", "input": [3, 32, 32]}
    strategy = {"kind": "local", "inner_steps": 1, "replicas": 2, "delay": delay}
    equal = measured(10).model_copy(update={"messages": {"int4": measured(10).messages["int4"]}})
    down_is_fast = equal.model_copy(update={"down_bytes_per_s": 100 * equal.down_bytes_per_s})

    def steps(link: MeasuredLink, more: dict[str, Any]) -> int:
        return choose_codecs(sync(strategy=strategy, **more), [link] * 2).inner_steps or 0

    assert steps(equal, drafted) < 1.15 * steps(down_is_fast, drafted)
    assert steps(equal, drafted) < 0.65 * steps(equal, {})


def test_a_codec_that_a_worker_does_not_know_is_not_chosen() -> None:
    newer = measured(50, 0.1, 0.1)
    known = {name: newer.messages[name] for name in ("float32", "float16", "int8", "topk")}
    older = newer.model_copy(update={"messages": known})
    assert set(CANDIDATES) == set(newer.messages)
    assert choose_codecs(sync(), [newer, newer]).codec == CodecSpec(up="lowrank2", down="lowrank2")
    assert choose_codecs(sync(), [newer, older]).codec == CodecSpec(up="topk", down="topk")


def test_the_worker_with_the_worst_link_for_its_speed_decides() -> None:
    fine, thin = measured(10_000, 0.05, 0.01), measured(20, 0.05, 0.01)
    assert choose_codecs(sync(), [fine, thin]).codec == choose_codecs(sync(), [thin, thin]).codec
    assert choose_codecs(sync(), [fine, thin]).slowest == thin
    slow_but_thin = measured(20, 5.0, 0.01)  # it computes for so long that its link is idle
    assert choose_codecs(sync(), [fine, slow_but_thin]).codec == CodecSpec(up="float16", down="float32")


def test_where_nothing_suffices_what_sends_least_is_taken_and_said() -> None:
    choice = choose_codecs(sync(), [measured(1, 0.001)])
    assert choice.codec == CodecSpec(up="lowrank1", down="lowrank1") and choice.sending > SENDING
    assert "; no other choice takes less. With lowrank1 up, the weights depend on which workers" in choice.reason


def test_where_coding_takes_longer_than_sending_nothing_is_given_up_for_fewer_bytes() -> None:
    choice = choose_codecs(sync(), [measured(10_000, 0.001, 0.001, coding_s=0.001)])
    assert choice.codec == CodecSpec(up="float16", down="float32") and choice.sending > SENDING


def test_replicas_take_as_many_steps_as_keep_the_link_free() -> None:
    choice = choose_codecs(local(), [measured(140, size=0.9)] * 2)
    assert choice.codec == CodecSpec(up="int4", down="int4") and choice.inner_steps is not None and not choice.delay
    sending = 0.9 * BOTH_WAYS / 17.5e6
    assert sending / (sending + 0.1 * choice.inner_steps) <= PLANNED
    assert sending / (sending + 0.1 * 0.7 * choice.inner_steps) > PLANNED
    assert idle(choice.inner_steps, 2) <= IDLE < idle(88, 2)  # which would have sufficed
    assert "int4 up, int4 down, " in choice.reason and "sends 140 Mbit/s and takes 100 ms" in choice.reason
    assert "depend on which" not in choice.reason and "delay" not in choice.reason


@pytest.mark.parametrize("mbit_s", [20, 40, 60])
def test_before_steps_are_too_many_a_delay_is_added(mbit_s: float) -> None:
    choice = choose_codecs(local(), [measured(mbit_s)] * 2)
    assert choice.delay == 1 and not CODECS[choice.codec.up].residual
    assert choice.inner_steps and DELAYED_STEPS <= choice.inner_steps <= MANY_STEPS
    assert "a delay of 1" in choice.reason and "keep it from computing for" in choice.reason
    decided = local().chosen(choice.codec, choice.inner_steps, delay=choice.delay)
    assert (decided.strategy.lag, decided.strategy.steps) == (1, choice.inner_steps)


@pytest.mark.parametrize("mbit_s", [5, 20, 40, 60])
def test_replicas_whose_state_is_kept_get_an_overlap_in_place_of_a_delay(mbit_s: float) -> None:
    spec = local(state="kept")
    choice = choose_codecs(spec, [measured(mbit_s)] * 2)
    decided = spec.chosen(choice.codec, choice.inner_steps, delay=choice.delay).strategy
    assert choice.inner_steps and decided.early_steps == choice.overlap == math.ceil(0.4 * choice.inner_steps)
    assert decided.model_dump()["delay"] == 0 and decided.model_dump()["outer_momentum"] == 0.9
    assert f"an overlap of {choice.overlap} steps (it computes" in choice.reason and "delay" not in choice.reason
    assert "settle" not in chosen_for(spec, [measured(mbit_s)] * 2)["reason"]


def test_a_delay_that_was_set_stays_one_where_the_state_is_kept() -> None:
    strategy = {"kind": "local", "replicas": 2, "delay": 1, "inner_state": "kept"}
    choice = choose_codecs(sync(strategy=strategy), [measured(40)] * 2)
    assert (choice.delay, choice.overlap) == (1, 0)


@pytest.mark.parametrize("mbit_s", [1, 2, 5])
def test_updates_with_error_feedback_come_after_that_the_least_lossy_first(mbit_s: float) -> None:
    choice = choose_codecs(local(), [measured(mbit_s)] * 2)
    assert choice.delay == 1 and choice.inner_steps is not None and choice.inner_steps <= MANY_STEPS
    names = [*CODECS]
    assert choice.codec.up == choice.codec.down == ("lowrank4" if mbit_s == 1 else "lowrank8")
    one = measured(mbit_s)
    known = {name: coded for name, coded in one.messages.items() if name in names[: names.index(choice.codec.up)]}
    less_lossy = choose_codecs(local(), [one.model_copy(update={"messages": known})] * 2)
    assert less_lossy.inner_steps and less_lossy.inner_steps > MANY_STEPS


def test_a_job_that_has_a_delay_keeps_it_and_its_outer_step() -> None:
    spec = sync(strategy={"kind": "local", "replicas": 2, "delay": 1, "outer_lr": 0.4, "outer_momentum": 0.1})
    choice = choose_codecs(spec, [measured(40)] * 2)
    decided = spec.chosen(choice.codec, choice.inner_steps, delay=choice.delay).strategy.model_dump()
    assert (decided["delay"], decided["outer_lr"], decided["outer_momentum"]) == (1, 0.4, 0.1)


@pytest.mark.parametrize("steps", [1, 5])
@pytest.mark.parametrize("state", ["restart", "kept"])
@pytest.mark.parametrize("model", MODELS)
def test_a_job_is_planned_with_the_memory_that_any_choice_needs(model: str, state: str, steps: int) -> None:
    spec = local(inner_steps=steps, replicas=4, state=state)
    room = seat_bytes(spec, "cpu")
    for link in LINKS:
        choice = choose_codecs(spec, [measured(link, **MODELS[model])] * 4)
        decided = spec.chosen(choice.codec, choice.inner_steps, delay=choice.delay)
        assert decided.broker_bytes <= spec.broker_bytes and seat_bytes(decided, "cpu") <= room


def test_an_epoch_too_short_for_enough_steps_gets_no_delay() -> None:
    spec = local(dataset="digits", model="mlp", micro_batch=32)  # 23 steps in an epoch for each replica
    choice = choose_codecs(spec, [measured(0.5)] * 2)
    assert (choice.delay, choice.inner_steps) == (0, 23)


def test_an_outer_step_that_does_not_settle_with_a_delay_is_replaced() -> None:
    plain = sync(strategy={"kind": "local", "replicas": 2, "outer_lr": 1, "outer_momentum": 0})
    outer = [plain.chosen(CodecSpec(), 50, delay=delay).strategy.model_dump() for delay in (0, 1)]
    assert [(one["outer_lr"], one["outer_momentum"]) for one in outer] == [(1, 0), (0.6, 0)]
    told = "; outer_lr 0.6, since the job's own outer step does not settle with a delay"
    assert told in chosen_for(plain, [measured(40)] * 2)["reason"]
    fast = chosen_for(plain, [measured(4650)] * 2)["reason"]
    assert "settle" not in fast and "sends 4,650 Mbit/s" in fast


def idle(steps: int, replicas: int) -> float:
    """Share of an epoch's time, 1,875 micro-batches, in which a replica has nothing to do."""
    plan = local(inner_steps=steps, replicas=replicas).plan
    rounds = [plan.round(version) for version in range(plan.rounds_per_epoch)]
    time = sum(max(len(plan.micro_batches(unit)) for unit in one.units) for one in rounds)
    return 1 - 1875 / (replicas * time)


def test_steps_with_which_an_epoch_is_made_of_whole_rounds_already_stay_as_they_are() -> None:
    needed = 0.6 * BOTH_WAYS * (1 / PLANNED - 1) / 0.1 / 125_000
    choice = choose_codecs(local(replicas=4), [measured(needed / 94, size=0.6)] * 4)
    assert choice.inner_steps in (94, 95) and idle(choice.inner_steps, 4) <= IDLE


def test_a_jobs_own_inner_steps_are_the_fewest() -> None:
    plenty = choose_codecs(local(inner_steps=400, epochs=1), [measured(100, size=0.3)] * 2)
    assert plenty.inner_steps == 400 and plenty.codec.up == "float16"  # which suffices with so many


def test_on_the_thinnest_links_replicas_leave_out_what_matters_least() -> None:
    choice = choose_codecs(local(), [measured(0.1)] * 2)
    assert choice.codec.up == "lowrank1" and choice.inner_steps is not None and choice.inner_steps <= MOST_STEPS


def test_no_more_steps_than_an_epoch_has() -> None:
    spec = local(dataset="digits", model="mlp", inner_steps=2, replicas=4, micro_batch=32)
    choice = choose_codecs(spec, [measured(0.1)] * 4)
    assert choice.inner_steps == math.ceil(spec.plan.micro_batches_per_epoch / 4) == 12


def test_steps_that_no_epoch_divides_into_stay_as_they_are_needed() -> None:
    spec = local(dataset="digits", model="mlp", inner_steps=2, replicas=1, micro_batch=2)  # 719 in an epoch
    size = 9.65 * PLANNED / (1 - PLANNED) * 2.5e6 / BOTH_WAYS  # for what 96.5 steps take
    choice = choose_codecs(spec, [measured(20, size=size)])
    assert choice.inner_steps == 97 and choice.sending == pytest.approx(PLANNED, rel=0.01)


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


def loss_of(strategy: dict[str, Any], workers: int, mbit_s: float) -> int:
    """The place, from the most exact on, of the codecs chosen for strategy `local` with steps that may not grow."""
    spec = sync(strategy={"kind": "local", "replicas": workers} | strategy, workers={"min": workers, "max": workers})
    choice = choose_codecs(spec, [measured(mbit_s)] * workers)
    overlap = strategy.get("overlap", 0)
    assert choice.inner_steps is None and (choice.delay, choice.overlap) == (int(overlap > 0), overlap)
    assert spec.chosen(choice.codec, choice.inner_steps, None, choice.delay).strategy == spec.strategy
    return PAIRS.index((choice.codec.up, choice.codec.down))


def test_all_steps_of_a_unit_count_as_computing_where_they_may_not_grow() -> None:
    robust = {"combine": "median"}
    assert loss_of(robust | {"inner_steps": 125}, 3, 50) < loss_of(robust | {"inner_steps": 5}, 3, 50)


def test_sending_counts_as_far_as_no_overlap_hides_it() -> None:
    kept = {"inner_state": "kept", "inner_steps": 20}
    assert loss_of(kept | {"overlap": 19}, 2, 50) < loss_of(kept | {"overlap": 1}, 2, 50)


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
        assert DELAYED_STEPS <= choice.inner_steps < MANY_STEPS


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
