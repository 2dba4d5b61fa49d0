"""A JobSpec from flags, `--set` and a document."""

import pytest

from computeshare.cli.jobs import spec_options
from computeshare.errors import SpecError
from computeshare.jobspec.spec import JobSpec

BASE = {"dataset": "digits", "model": "mlp"}


def test_a_document_that_is_no_object_is_answered_with_one_that_is() -> None:
    with pytest.raises(SpecError, match="must hold an object, not list") as caught:
        spec_options.parse("[1]", "standard input")
    told = str(caught.value)
    assert spec_options.check(spec_options.parse(told[told.index("{") :], "the example")).model == "lenet5"


def test_flags_not_given_leave_the_document_alone() -> None:
    assert spec_options.build(BASE, {"queue": None, "workers.max": None}, []) == BASE


def test_dotted_flags_reach_nested_fields_and_settings_come_last() -> None:
    built = spec_options.build(
        BASE, {"workers.max": 4, "seed": 1}, ["workers.min=2", "seed=9", "strategy.max_norm=5.0"]
    )
    assert built == {**BASE, "workers": {"max": 4, "min": 2}, "seed": 9, "strategy": {"max_norm": 5.0}}
    assert spec_options.check(built).strategy.max_norm == 5.0


def test_the_document_given_is_not_changed() -> None:
    document = {**BASE, "workers": {"min": 1}}
    spec_options.build(document, {"workers.min": 3}, [])
    assert document["workers"] == {"min": 1}


def test_needs_add_to_those_of_the_document() -> None:
    document = {**BASE, "requires": {"memory": "8GB"}}
    built = spec_options.build(document, {"requires.device": "cuda", "requires.labels.room": "attic"}, [])
    assert built["requires"] == {"memory": "8GB", "device": "cuda", "labels": {"room": "attic"}}


def test_a_learning_rate_alone_keeps_the_default_optimizers_momentum() -> None:
    chosen = spec_options.check(spec_options.build(BASE, {"optimizer.lr": 0.2}, [])).optimizer
    default = JobSpec.model_validate(BASE).optimizer
    assert chosen.model_dump() == {**default.model_dump(), "lr": 0.2}


def test_a_named_optimizer_starts_from_its_own_defaults() -> None:
    built = spec_options.build({**BASE, "optimizer": {"name": "SGD", "momentum": 0.9}}, {"optimizer.name": "Adam"}, [])
    assert built["optimizer"] == {"name": "Adam"}


def test_a_learning_rate_changes_the_documents_optimizer() -> None:
    document = {**BASE, "optimizer": {"name": "Adam", "eps": 1e-6}}
    assert spec_options.build(document, {"optimizer.lr": 0.1}, [])["optimizer"] == {
        "name": "Adam",
        "eps": 1e-6,
        "lr": 0.1,
    }


def test_a_whole_optimizer_by_set_replaces_the_default() -> None:
    built = spec_options.build(BASE, {"optimizer.lr": None}, ['optimizer={"name":"Adam"}', "optimizer.eps=0.5"])
    assert built["optimizer"] == {"name": "Adam", "eps": 0.5}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a=1", 1),
        ("a=true", True),
        ("a=[3,32,32]", [3, 32, 32]),
        ("a=null", None),
        ("a=word", "word"),
        ("a=x=y", "x=y"),
    ],
)
def test_settings_are_json_or_else_the_text_itself(text: str, value: object) -> None:
    assert spec_options.parse_setting(text) == ("a", value)


@pytest.mark.parametrize("text", ["a", "=1", "a.=1", ".a=1", "a..b=1"])
def test_a_setting_without_field_and_value_is_refused(text: str) -> None:
    with pytest.raises(SpecError, match="give FIELD=VALUE"):
        spec_options.parse_setting(text)


def test_a_setting_below_a_number_names_where_it_fails() -> None:
    with pytest.raises(SpecError, match=r"^seed\.x\.y: seed is not an object$"):
        spec_options.build({**BASE, "seed": 3}, {}, ["seed.x.y=1"])


@pytest.mark.parametrize("text", ["", "[1]", "{", '{"seed": NaN}'])
def test_a_document_that_is_no_json_object_names_its_source(text: str) -> None:
    with pytest.raises(SpecError, match=r"job\.json"):
        spec_options.parse(text, "job.json")


def test_every_wrong_field_gets_a_line_of_its_own() -> None:
    with pytest.raises(SpecError) as caught:
        spec_options.check({"dataset": "no pe", "model": "mlp", "seed": -1, "workers": {"min": 0}})
    lines = str(caught.value).splitlines()
    assert [line.split(":")[0] for line in lines] == ["dataset", "workers.min", "seed"]
    assert lines[0].startswith("dataset: unknown dataset 'no pe'; allowed: caltech101, caltech256")


def test_more_workers_than_a_round_has_work_for_are_refused_by_name() -> None:
    with pytest.raises(SpecError, match=r"^workers\.min: must be at most 4, because a round has 4 micro-batches"):
        spec_options.check({**BASE, "workers": {"min": 5}})


def test_an_unknown_field_is_answered_with_the_allowed_ones() -> None:
    with pytest.raises(SpecError, match=r"^workers\.most: unknown field; allowed: max, min$"):
        spec_options.check({**BASE, "workers": {"most": 3}})
    with pytest.raises(SpecError, match=r"^epoch: unknown field; allowed: .*epochs.*rounds"):
        spec_options.check({**BASE, "epoch": 3})


def test_a_file_in_yaml_has_jsons_types() -> None:
    text = """
    dataset: mnist  # a comment
    strategy: {kind: gossip, every: 10}
    optimizer: {name: SGD, lr: 1e-3, nesterov: true}
    name: 2026-01-02
    notes: no
    stop: null
    """
    assert spec_options.parse(text, "job.yaml") == {
        "dataset": "mnist",
        "strategy": {"kind": "gossip", "every": 10},
        "optimizer": {"name": "SGD", "lr": 0.001, "nesterov": True},
        "name": "2026-01-02",
        "notes": "no",
        "stop": None,
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- 1", "must hold an object.*not list"),
        ("a: [", "job.yml is not YAML"),
        ("", "not NoneType"),
        ("a: !!python/name:os.system", "not YAML"),
    ],
)
def test_a_wrong_file_in_yaml_is_named(text: str, said: str) -> None:
    with pytest.raises(SpecError, match=said):
        spec_options.parse(text, "job.yml")


@pytest.mark.parametrize(
    ("document", "size", "micro_batch"),
    [
        ({}, 128, 32),
        ({"micro_batches_per_round": 2}, 128, 64),
        ({"strategy": {"kind": "local"}}, 128, 128),
        ({"strategy": {"kind": "async", "buffer": 3}}, 128, 128),
        ({"strategy": {"kind": "signsgd"}}, 8, 2),
    ],
)
def test_a_batch_size_is_that_of_a_round_or_of_a_step_of_what_sets_its_round_itself(
    document: dict[str, object], size: int, micro_batch: int
) -> None:
    built = spec_options.with_batch_size({**BASE, **document}, size)
    assert built == {**BASE, **document, "micro_batch": micro_batch}
    assert spec_options.check(built).micro_batch == micro_batch


def test_a_batch_size_that_the_micro_batches_cannot_share_is_refused() -> None:
    with pytest.raises(SpecError, match="--batch-size 10 cannot be shared equally by the 4 micro-batches"):
        spec_options.with_batch_size(BASE, 10)


def test_another_strategy_starts_from_its_own_defaults() -> None:
    document = {**BASE, "strategy": {"kind": "local", "inner_steps": 50}}
    assert spec_options.build(document, {"strategy.kind": "async"}, [])["strategy"] == {"kind": "async"}
    assert spec_options.build(document, {"strategy.kind": "local"}, [])["strategy"] == document["strategy"]
    built = spec_options.build(BASE, {"strategy.kind": "local"}, ["strategy.inner_steps=7"])
    assert built["strategy"] == {"kind": "local", "inner_steps": 7}
