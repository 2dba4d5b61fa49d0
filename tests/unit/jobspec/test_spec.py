"""JobSpec: good defaults, and every wrong field named with what is allowed."""

from contextlib import nullcontext
from typing import Any

import pytest
from pydantic import ValidationError

from computeshare.jobspec.memory_estimate import seat_bytes
from computeshare.jobspec.optimizer_spec import OptimizerSpec
from computeshare.jobspec.spec import JobSpec
from computeshare.strategies.buffered_async import AsyncStrategy
from computeshare.strategies.local import LocalStrategy


def test_only_dataset_and_model_are_needed() -> None:
    spec = JobSpec(dataset="mnist", model="lenet5")
    assert spec.rounds_total == 469  # one epoch of 60,000 samples by 4 x 32
    assert spec.title == "lenet5 on mnist"


def test_rounds_total_counts_short_rounds_at_each_epochs_end() -> None:
    spec = JobSpec(dataset="mnist", model="lenet5", micro_batch=7, micro_batches_per_round=1000, epochs=3)
    assert spec.rounds_total == 3 * 9  # 8,572 micro-batches an epoch


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("dataset", "imagenet/21k", "unknown dataset 'imagenet/21k'; allowed: caltech101, .*cifar10, .*mnist"),
        ("dataset", "CelebA", "CelebA cannot be trained on: it has forty attributes per image, not one label"),
        ("dataset", "LSUN", "LSUN cannot be trained on: torchvision's reader .* unpickles"),
        ("model", "lenet6", "allowed: .*lenet5"),
        ("micro_batch", 0, "greater than or equal to 1"),
        ("queue", "a b", "pattern"),
        ("name", "a\nb", "control characters"),
        ("optimizer", {"name": "sgd"}, "unknown optimizer 'sgd'; allowed: .*SGD"),
        ("optimizer", {"name": "SGD", "beta": 1}, "has no argument 'beta'; allowed: .*momentum"),
        ("optimizer", {"name": "SGD", "lr": "fast"}, "lr must be a number"),
        ("optimizer", {"name": "SGD", "lr": float("nan")}, "lr must be a number"),
        ("optimizer", {"name": "SGD", "lr": 10**400}, "lr must be a number"),
        ("optimizer", {"name": "SGD", "lr": -1}, "lr must be at least 0"),
        ("strategy", {"kind": "rumour"}, "Input should be 'sync', 'async', 'local'"),
        ("codec", {"down": "auto"}, "'bfloat16', 'int8', 'int4'"),
        ("codec", {"up": "jpeg"}, "'lowrank2', 'topk' or 'lowrank1'"),
        ("workers", {"min": 3, "max": 2}, "must not be greater than max"),
        ("input", [2, 32, 32], "1 or 3 channels"),
        ("lr_scaling", "sqrt", "'none' or 'linear'"),
        ("validation", 0.6, "less than or equal to 0.5"),
        ("validation", 1e-6, "too small to hold out a sample"),
        ("accumulate", 5, r"must divide micro_batch \(32\)"),
        ("augment", ["blur"], "'crop', 'flip' or 'randaugment'"),
        ("augment", ["flip", "flip"], "each transformation once"),
        ("epoch", 3, "Extra inputs are not permitted"),
    ],
)
def test_a_wrong_field_is_named_with_what_is_allowed(field: str, value: Any, says: str) -> None:
    with pytest.raises(ValidationError, match=says) as caught:
        JobSpec.model_validate({"dataset": "mnist", "model": "lenet5", field: value})
    assert caught.value.errors()[0]["loc"][0] == field


@pytest.mark.parametrize("name", ["FashionMNIST", "fashion_mnist", "fashion-mnist"])
def test_capitals_and_hyphens_in_a_data_sets_name_make_no_difference(name: str) -> None:
    assert JobSpec(dataset=name, model="lenet5").dataset == "fashion-mnist"


@pytest.mark.parametrize(
    ("optimizer", "field", "says"),
    [
        ({"name": "sgd"}, "name", "unknown optimizer"),
        ({"name": "SGD", "nesterov": True}, "nesterov", "needs momentum above 0"),
        ({"name": "SGD", "nesterov": True, "momentum": 0.9, "dampening": 0.1}, "nesterov", "dampening 0"),
        ({"name": "SGD", "momentum": -0.1}, "momentum", "at least 0"),
        ({"name": "SGD", "weight_decay": 1e12}, "weight_decay", "at most 1e\\+08"),
        ({"name": "Adam", "eps": -1e-8}, "eps", "at least 0"),
        ({"name": "Adam", "betas": [0.9]}, "betas", "must be 2 numbers"),
        ({"name": "Adam", "betas": [0.9, 1.0]}, "betas", "at least 0 and below 1"),
        ({"name": "Adam", "betas": [0.9, "x"]}, "betas", "a list of numbers"),
        ({"name": "Adam", "betas": [0.9, None]}, "betas", "at least 0 and below 1"),
        ({"name": "Rprop", "etas": [0.5, 1.0]}, "etas", "above 1"),
    ],
)
def test_an_optimizers_wrong_argument_is_named(optimizer: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(ValidationError, match=says) as caught:
        JobSpec.model_validate({"dataset": "mnist", "model": "lenet5", "optimizer": optimizer})
    assert caught.value.errors()[0]["loc"] == ("optimizer", field)


@pytest.mark.parametrize(
    "wrong",
    [{"micro_batch": "32"}, {"rounds": True}, {"micro_batch": 32.0}, {"workers": {"min": "1"}}, {"seed": "0"}],
    ids=str,
)
def test_a_number_in_quotes_or_a_truth_value_is_no_number(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="should be a valid integer"):
        JobSpec.model_validate({"dataset": "mnist", "model": "lenet5", **wrong})


def test_an_optimizer_without_a_name_changes_the_default_and_a_named_one_has_torchs_defaults() -> None:
    def optimizer(given: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        spec = JobSpec.model_validate({"dataset": "mnist", "model": "lenet5", "optimizer": given})
        return spec.optimizer.name, spec.optimizer.arguments

    assert optimizer({}) == ("SGD", {"lr": 0.05, "momentum": 0.9})
    assert optimizer({"lr": 0.1}) == ("SGD", {"lr": 0.1, "momentum": 0.9})
    assert optimizer({"name": "SGD", "lr": 0.1}) == ("SGD", {"lr": 0.1})
    local = {"kind": "local", "inner_optimizer": {"lr": 0.1}}
    spec = JobSpec.model_validate({"dataset": "mnist", "model": "lenet5", "strategy": local})
    assert spec.strategy.inner and (spec.strategy.inner.name, spec.strategy.inner.arguments) == ("AdamW", {"lr": 0.1})


def test_rounds_and_epochs_exclude_each_other() -> None:
    with pytest.raises(ValidationError, match="rounds or epochs, not both"):
        JobSpec(dataset="mnist", model="lenet5", rounds=3, epochs=1)


def test_a_model_that_cannot_see_the_data_set_is_refused_with_a_way_out() -> None:
    with pytest.raises(ValidationError, match=r"lenet5 needs an input of at least .* but digits has 8x8: set input"):
        JobSpec(dataset="digits", model="lenet5")
    JobSpec(dataset="digits", model="lenet5", input=(1, 32, 32))
    with pytest.raises(ValidationError, match=r"75x75, but input is 32x32: set input, for example to \[3, 75, 75\]"):
        JobSpec(dataset="digits", model="inception_v3", input=(3, 32, 32))


def test_batch_norm_refuses_a_last_micro_batch_of_one_sample() -> None:
    with pytest.raises(ValidationError, match="last micro-batch has a single sample"):
        JobSpec(dataset="mnist", model="resnet18", input=(3, 32, 32), micro_batch=59_999)


@pytest.mark.parametrize(
    ("micro_batch", "accumulate", "says"),
    [
        (32, 32, "a piece of a micro-batch has"),
        (1434, 3, None),
        (1077, 3, "a piece of the last micro-batch has"),
    ],
)
def test_batch_norm_refuses_a_piece_of_one_sample(micro_batch: int, accumulate: int, says: str | None) -> None:
    job = {"dataset": "digits", "model": "resnet18", "input": [3, 32, 32], "micro_batch": micro_batch}
    with pytest.raises(ValidationError, match=f"{says} a single sample.*or accumulate") if says else nullcontext():
        JobSpec.model_validate({**job, "accumulate": accumulate})


@pytest.mark.parametrize(("version", "wanted"), [(99, False), (100, True), (250, True), (500, True), (499, False)])
def test_checkpoints_come_at_either_interval_and_at_the_end(version: int, wanted: bool) -> None:
    spec = JobSpec(dataset="mnist", model="mlp", rounds=500, checkpoint_every=100, evaluate_every=125)
    assert spec.wants_checkpoint(version) is wanted


def test_held_out_samples_do_not_train() -> None:
    spec = JobSpec(dataset="digits", model="mlp", validation=0.1, micro_batch=32, epochs=1)
    assert (spec.plan.samples, spec.scored_part) == (1437 - 144, "validation")
    assert (
        JobSpec(dataset="digits", model="mlp").plan.samples,
        JobSpec(dataset="digits", model="mlp").scored_part,
    ) == (
        1437,
        "test",
    )


def test_zero_means_only_at_the_end() -> None:
    spec = JobSpec(dataset="mnist", model="mlp", rounds=500, checkpoint_every=0, evaluate_every=0)
    assert [v for v in range(501) if spec.wants_checkpoint(v)] == [500]


def test_the_size_of_a_model_is_judged_at_the_jobs_own_input_and_with_its_optimizer() -> None:
    big = {"dataset": "mnist", "model": "mlp", "input": (3, 1024, 1024)}
    assert JobSpec.model_validate({"dataset": "mnist", "model": "vgg16", "input": (3, 32, 32)})
    assert JobSpec.model_validate({**big, "codec": {"down": "float32"}})
    small = JobSpec.model_validate({"dataset": "cifar10", "model": "resnet110", "input": (3, 224, 224)})
    assert small.parameters == 1_727_962
    with pytest.raises(ValidationError, match=r"mlp has 438,901,280 parameters.* limit with Adam is 333,333,333"):
        JobSpec.model_validate({**big, "optimizer": {"name": "Adam"}})


def robust(**changes: Any) -> JobSpec:
    values = {"dataset": "mnist", "model": "lenet5", "strategy": {"combine": "median"}, "workers": {"min": 3}}
    return JobSpec.model_validate({**values, "micro_batches_per_round": 6, **changes})


def test_workers_share_a_round_where_some_of_them_may_be_bad() -> None:
    assert robust().sharers == 3
    assert robust(workers={"min": 2}, micro_batches_per_round=4).sharers == 0  # nobody would be outvoted
    assert robust(strategy={"combine": "mean"}, micro_batches_per_round=4).sharers == 0


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"micro_batches_per_round": 4}, r"rounds of 4 micro-batches: .* a multiple of workers.min \(3\)"),
        ({"micro_batches_per_round": 8, "workers": {"min": 4}, "strategy": {"combine": "trimmed_mean"}}, None),
        ({"micro_batches_per_round": 2}, r"must be at most 2"),
        ({"micro_batch": 25}, None),  # 2,400 an epoch: all rounds are whole
        ({"micro_batch": 30}, "an epoch's last round of 2 .* so that the last round is one, too"),
        ({"micro_batch": 32, "micro_batches_per_round": 75}, None),
        ({"micro_batch": 32, "micro_batches_per_round": 1872}, None),  # and three more
        ({"micro_batch": 32, "micro_batches_per_round": 1874, "workers": {"min": 5, "max": 9}}, "rounds? of 1 micro-"),
        ({"strategy": {"combine": "median", "quorum": 0.9}}, "complete rounds: set quorum to 1"),
        ({"strategy": {"combine": "median", "quorum": 0.9}, "workers": {"min": 2}}, None),
        ({"micro_batches_per_round": 4096, "model": "simplenet"}, None),
        ({"micro_batches_per_round": 4095, "model": "mlp", "input": (3, 128, 128)}, None),
    ],
)
def test_rounds_that_a_minority_could_sway_are_refused_with_a_way_out(
    changes: dict[str, Any], says: str | None
) -> None:
    if says is None:
        assert robust(**changes)
        return
    with pytest.raises(ValidationError, match=says):
        robust(**changes)


@pytest.mark.parametrize("quorum", [0.49, 1.01, float("nan")])
def test_a_quorum_is_from_a_half_to_all(quorum: float) -> None:
    with pytest.raises(ValidationError, match=r"strategy\.quorum"):
        JobSpec.model_validate({"dataset": "mnist", "model": "mlp", "strategy": {"quorum": quorum}})


def test_the_last_round_of_an_epoch_and_of_the_job_wait_for_everything() -> None:
    values = {"dataset": "digits", "model": "mlp", "strategy": {"quorum": 0.75}, "micro_batch": 64, "rounds": 8}
    spec = JobSpec.model_validate(values)  # 23 micro-batches an epoch: six rounds
    assert [spec.quorum_of(version) for version in range(8)] == [0.75] * 5 + [1.0, 0.75, 1.0]


@pytest.mark.parametrize(
    ("every", "scored"), [(0, [500]), (200, [200, 400, 500]), (250, [250, 500]), (1000, [500])], ids=str
)
def test_versions_are_scored_when_asked_for_and_at_the_end(every: int, scored: list[int]) -> None:
    spec = JobSpec(dataset="digits", model="mlp", rounds=500, checkpoint_every=50, evaluate_every=every)
    assert [v for v in range(501) if spec.wants_score(v)] == scored
    assert all(spec.wants_checkpoint(version) for version in scored)


def local(strategy: dict[str, Any] | None = None, **changes: Any) -> JobSpec:
    chosen = {"kind": "local", "inner_steps": 10, "replicas": 3, **(strategy or {})}
    return JobSpec.model_validate({"dataset": "mnist", "model": "lenet5", "strategy": chosen, **changes})


def buffered(strategy: dict[str, Any] | None = None, **changes: Any) -> JobSpec:
    chosen = {"kind": "async", **(strategy or {})}
    return JobSpec.model_validate({"dataset": "mnist", "model": "lenet5", "strategy": chosen, **changes})


def test_a_local_jobs_round_and_optimizer_follow_from_its_strategy() -> None:
    spec = local()
    assert spec.micro_batches_per_round == 30
    outer = {"name": "SGD", "lr": 0.7, "momentum": 0.9, "nesterov": True}
    assert spec.optimizer == OptimizerSpec.model_validate(outer)
    assert (spec.plan.inner_steps, spec.plan.units_per_round) == (10, 3)
    assert spec.rounds_total == 63  # 1,875 micro-batches, 188 units
    assert local(epochs=3).rounds_total == 189
    plain = local({"outer_momentum": 0.0, "outer_lr": 1})
    assert plain.optimizer == OptimizerSpec.model_validate({"name": "SGD", "lr": 1, "momentum": 0, "nesterov": False})


def test_an_async_jobs_buffer_takes_the_place_of_its_round() -> None:
    spec = buffered({"buffer": 25})
    assert (spec.micro_batches_per_round, spec.plan.units_per_round, spec.rounds_total) == (25, 25, 75)
    assert buffered().strategy == AsyncStrategy(buffer=10, max_staleness=10, weighting="inverse_sqrt")


@pytest.mark.parametrize("make", [local, buffered, robust])
def test_a_stored_specification_can_be_read_again(make: Any) -> None:
    spec = make()
    assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec
    assert JobSpec.model_validate_json(spec.model_dump_json()) == spec


WRONG = [
    (local, {"optimizer": {"name": "Adam"}}, ("optimizer",), "set strategy.inner_optimizer, "),
    (local, {"micro_batches_per_round": 4}, ("micro_batches_per_round",), "strategy.replicas x strategy.inner_steps"),
    (local, {"lr_scaling": "linear"}, ("lr_scaling",), "set strategy.inner_optimizer.lr instead"),
    (local, {"strategy": {"inner_steps": 0}}, ("strategy", "inner_steps"), "greater than or equal to 1"),
    (local, {"strategy": {"outer_momentum": 1.0}}, ("strategy", "outer_momentum"), "less than 1"),
    (local, {"strategy": {"outer_lr": 0}}, ("strategy", "outer_lr"), "greater than 0"),
    (local, {"strategy": {"inner_state": "lost"}}, ("strategy", "inner_state"), "'restart' or 'kept'"),
    (local, {"strategy": {"inner_state": "kept", "combine": "median"}}, ("strategy",), "set inner_state to restart"),
    (local, {"strategy": {"replicas": 4096, "inner_steps": 10_000}}, ("strategy",), "at most 100,000"),
    (
        local,
        {"strategy": {"quorum": 0.9}},
        ("strategy", "quorum"),
        "unknown field; fields of strategy local: .*outer_lr",
    ),
    (
        local,
        {"strategy": {"inner_optimizer": {"name": "SGD", "beta": 1}}},
        ("strategy", "inner_optimizer", "beta"),
        "SGD has no argument 'beta'",
    ),
    (
        local,
        {"strategy": {"inner_optimizer": {"name": "Adam", "lr": -1}}},
        ("strategy", "inner_optimizer", "lr"),
        "at least 0",
    ),
    (buffered, {"micro_batches_per_round": 4}, ("micro_batches_per_round",), "set strategy.buffer instead"),
    (buffered, {"strategy": {"weighting": "cube"}}, ("strategy", "weighting"), "'inverse_sqrt'"),
    (buffered, {"strategy": {"max_staleness": -1}}, ("strategy", "max_staleness"), "greater than or equal to 0"),
    (buffered, {"strategy": {"quorum": 0.5}}, ("strategy", "quorum"), "fields of strategy async: backup, buffer"),
    (robust, {"strategy": {"inner_steps": 5}}, ("strategy", "inner_steps"), "fields of strategy sync: backup, combine"),
    (
        robust,
        {"strategy": {"kind": ["sync"]}},
        ("strategy", "kind"),
        "'sync', 'async', 'local', 'gossip', 'pipeline', 'signsgd'",
    ),
    (robust, {"strategy": "sync"}, ("strategy",), "must be an object"),
    (robust, {"strategy": None}, ("strategy",), "must be an object"),
    (robust, {"micro_batches_per_round": 4097}, ("micro_batches_per_round",), "at most 4096"),
]


@pytest.mark.parametrize(("make", "changes", "loc", "says"), WRONG)
def test_what_contradicts_the_strategy_is_named_with_where_it_belongs(
    make: Any, changes: dict[str, Any], loc: tuple[str, ...], says: str
) -> None:
    nested = changes["strategy"] if make is not robust and "strategy" in changes else None
    with pytest.raises(ValidationError, match=says) as caught:
        make(nested) if nested else make(**changes)
    assert [error["loc"] for error in caught.value.errors()] == [loc]


def test_what_is_no_specification_is_refused() -> None:
    for nothing in (None, [], "mnist"):
        with pytest.raises(ValidationError, match="valid dictionary"):
            JobSpec.model_validate(nothing)


@pytest.mark.parametrize(
    ("make", "strategy", "says"),
    [
        (local, {"replicas": 5, "inner_steps": 25}, None),  # 75 units an epoch
        (
            local,
            {"replicas": 5, "inner_steps": 20},
            "last round of 4 replicas: make strategy.replicas a multiple of wo",
        ),
        (local, {"replicas": 6, "inner_steps": 25}, "rounds of 6 replicas"),
        (buffered, {"buffer": 15}, None),
        (buffered, {"buffer": 25}, None),
        (buffered, {"buffer": 12}, "rounds of 12 micro-batches: make strategy.buffer a multiple of workers.min"),
    ],
)
def test_other_strategies_tolerate_bad_workers_where_no_minority_can_sway_a_version(
    make: Any, strategy: dict[str, Any], says: str | None
) -> None:
    for combine in ("median", "trimmed_mean", "huber"):
        if says is None:
            assert make({**strategy, "combine": combine}, workers={"min": 5}).sharers == 5
            continue
        with pytest.raises(ValidationError, match=says):
            make({**strategy, "combine": combine}, workers={"min": 5})


def test_inner_steps_of_a_robust_job_are_not_chosen_anew() -> None:
    assert local().strategy.steps_may_grow
    assert not local(
        {"replicas": 3, "inner_steps": 25, "combine": "median"}, workers={"min": 3}
    ).strategy.steps_may_grow


def test_only_synchronous_rounds_have_a_quorum_and_plain_means_no_sharers() -> None:
    for spec in (local(workers={"min": 3}), buffered(workers={"min": 3})):
        assert spec.sharers == 0
        assert {spec.quorum_of(version) for version in range(5)} == {1.0}


@pytest.mark.parametrize(
    ("changes", "most", "way_out"),
    [
        ({}, 4, "a round has 4 micro-batches.*raise micro_batches_per_round"),
        ({"micro_batches_per_round": 7}, 7, "raise micro_batches_per_round"),
        ({"micro_batch": 20_000}, 3, "an epoch has 3 micro-batches.*lower micro_batch"),
        ({"strategy": {"kind": "local", "replicas": 3}}, 3, "a round has 3 replicas.*raise strategy.replicas"),
        ({"strategy": {"kind": "local", "replicas": 3}, "codec": "auto"}, 3, "raise strategy.replicas"),
        ({"strategy": {"kind": "async", "buffer": 5}}, 5, "a round has 5 micro-batches.*raise strategy.buffer"),
    ],
)
def test_a_job_cannot_wait_for_more_workers_than_a_round_has_work_for(
    changes: dict[str, Any], most: int, way_out: str
) -> None:
    def waiting_for(workers: int) -> JobSpec:
        base = {"dataset": "mnist", "model": "lenet5", "workers": {"min": workers, "max": 8}}
        return JobSpec.model_validate({**base, **changes})

    assert waiting_for(most).workers.min == most
    with pytest.raises(ValidationError, match=rf"(?s)must be at most {most}, .*{way_out}") as caught:
        waiting_for(most + 1)
    assert [error["loc"] for error in caught.value.errors()] == [("workers", "min")]


def test_the_brokers_share_grows_with_replicas_not_with_their_steps() -> None:
    few, more = local({"inner_steps": 5}).broker_bytes, local({"inner_steps": 500}).broker_bytes
    assert few == more
    per_replica = (local({"replicas": 13}).broker_bytes - few) / 10
    assert per_replica == 2 * 2 * local().parameters  # two rounds' updates in float16
    kept = local({"inner_state": "kept", "inner_optimizer": {"name": "AdamW"}}).broker_bytes
    assert kept - few >= 3 * 2 * 4 * local().parameters  # three replicas' two moments


def test_with_a_delay_the_broker_and_the_worker_hold_a_round_more() -> None:
    without, delayed = local(), local({"delay": 1})
    assert delayed.broker_bytes - without.broker_bytes == 3 * 2 * local().parameters  # three replicas' in float16
    assert seat_bytes(delayed, "cpu") - seat_bytes(without, "cpu") == 3 * 4 * local().parameters


@pytest.mark.parametrize("kind", ["sync", "local"])
def test_with_a_delay_each_round_but_the_last_has_the_next_ones_units_ahead(kind: str) -> None:
    document = {"dataset": "digits", "model": "mlp", "micro_batch": 64, "rounds": 8}
    spec = JobSpec.model_validate(document | {"strategy": {"kind": kind, "delay": 1}})
    rounds = [spec.round_from(version) for version in range(8)]
    assert [one.ahead for one in rounds] == [one.count for one in rounds[1:]] + [0]
    assert spec.strategy.recent == 2
    assert {JobSpec.model_validate(document).round_from(version).ahead for version in range(8)} == {0}


@pytest.mark.parametrize(
    ("lr", "momentum", "settles"),
    [(1.0, 0.0, False), (0.7, 0.9, False), (0.99, 0.0, True), (0.7, 0.3, True), (0.72, 0.3, False), (0.5, 0.3, True)],
)
def test_with_a_delay_an_outer_step_that_does_not_settle_is_refused(lr: float, momentum: float, settles: bool) -> None:
    outer = {"outer_lr": lr, "outer_momentum": momentum}
    assert local(outer)
    x, before, velocity = 1.0, 1.0, 0.0
    for _ in range(1000):  # the distance from an optimum that every replica reaches
        velocity = momentum * velocity + before
        x, before = x - lr * (before + momentum * velocity), x
    assert (abs(x) + abs(before) < 0.1) == settles
    with nullcontext() if settles else pytest.raises(ValidationError, match=r"do not settle: set outer_lr to 0\.6"):
        assert local({**outer, "delay": 1})


def test_the_outer_steps_defaults_are_others_with_a_delay() -> None:
    delayed = local({"delay": 1}).strategy
    assert isinstance(delayed, LocalStrategy) and (delayed.outer_lr, delayed.outer_momentum) == (0.6, 0)
    again = JobSpec.model_validate_json(local({"delay": 1}).model_dump_json()).strategy
    assert again == delayed
    changed = local({"delay": 1, "outer_lr": 0.7}).strategy
    assert isinstance(changed, LocalStrategy) and (changed.outer_lr, changed.outer_momentum) == (0.7, 0)


def test_an_overlap_is_a_delay_for_the_broker_alone() -> None:
    kept = {"inner_state": "kept", "inner_steps": 10}
    without, delayed = local(kept), local(kept | {"delay": 1})
    overlapping = local({"inner_steps": 10, "overlap": 9})
    assert overlapping.strategy.keeps_inner
    assert overlapping.broker_bytes == delayed.broker_bytes
    assert (overlapping.strategy.lag, overlapping.strategy.early_steps) == (1, 9)
    assert overlapping.strategy.outer_optimizer == without.strategy.outer_optimizer
    assert seat_bytes(overlapping, "cpu") - seat_bytes(delayed, "cpu") == 3 * 4 * local().parameters
    assert not overlapping.strategy.steps_may_grow


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"overlap": 10}, "set a smaller overlap"),
        ({"delay": 1}, "set one of them to 0"),
        ({"inner_state": "restart"}, "set inner_state to kept, or overlap to 0"),
        ({"overlap": -1}, "greater than or equal to 0"),
        ({"combine": "huber"}, "set inner_state to restart and overlap to 0, or combine to mean"),
    ],
)
def test_what_excludes_an_overlap_is_told_with_the_remedy(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        local({"inner_steps": 10, "inner_state": "kept", "overlap": 3} | changes)


def test_a_delay_and_a_quorum_exclude_each_other() -> None:
    with pytest.raises(ValidationError, match="set quorum to 1, or delay to 0"):
        JobSpec.model_validate({"dataset": "digits", "model": "mlp", "strategy": {"delay": 1, "quorum": 0.9}})
    with pytest.raises(ValidationError, match="less than or equal to 1"):
        JobSpec.model_validate({"dataset": "digits", "model": "mlp", "strategy": {"delay": 2}})


def test_an_inner_state_that_travels_must_fit_as_the_weights_must() -> None:
    big = {"model": "mlp", "input": (3, 1024, 1024)}
    adam = {"inner_optimizer": {"name": "Adam"}}
    assert local(adam, **big)  # restarted, it never leaves its worker
    with pytest.raises(ValidationError, match="limit with Adam is"):
        local({**adam, "inner_state": "kept"}, **big)
    assert isinstance(local({**adam, "inner_state": "kept"}).strategy, LocalStrategy)


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({}, None),
        ({"strategy": {"kind": "local"}}, None),
        ({"strategy": {"kind": "sync", "quorum": 0.9}, "codec": {"up": "int8"}}, None),
        ({"strategy": {"kind": "local", "inner_state": "kept"}}, "set strategy.inner_state to restart"),
        (
            {"strategy": {"kind": "local", "inner_steps": 10, "overlap": 3}},
            "set strategy.inner_state to restart and strategy.overlap to 0",
        ),
        ({"strategy": {"kind": "async"}}, "choose another strategy"),
        ({"codec": {"up": "topk"}}, "set another codec"),
        ({"codec": {"up": "int8", "down": "lowrank4"}}, None),
        ({"codec": {"up": "lowrank4"}}, "set another codec"),
        ({"codec": "auto"}, "set another codec"),
        ({"privacy": {"clip": 1.0, "noise": 4.0}}, "leave privacy out"),
    ],
)
def test_updates_are_audited_where_two_machines_send_the_same_bits(changes: dict[str, Any], remedy: str | None) -> None:
    document = {"dataset": "mnist", "model": "mlp", "audit": 0.02, **changes}
    if remedy is None:
        assert JobSpec.model_validate(document).audit == 0.02
        return
    with pytest.raises(ValidationError, match=f"{remedy}, or set audit to 0") as caught:
        JobSpec.model_validate(document)
    assert [error["loc"] for error in caught.value.errors()] == [("audit",)]
    assert JobSpec.model_validate(document | {"audit": 0})


def test_a_job_that_invited_machines_may_serve_has_audits_unless_it_says_otherwise() -> None:
    spec = JobSpec(dataset="mnist", model="mlp")
    assert spec.audit is None and spec.with_audits(is_open=False) is spec
    assert spec.with_audits(is_open=True).audit == 0.02
    for stays in (
        spec.model_copy(update={"audit": 0.0}),
        buffered(),
        JobSpec(dataset="mnist", model="mlp", codec="auto"),
    ):
        assert stays.with_audits(is_open=True) is stays
