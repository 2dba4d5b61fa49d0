"""A job as JSON, curl, command line and Python: whatever a document holds, each of them asks for the same job."""

import json
import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

import computeshare
from computeshare.cli.main import app
from computeshare.jobspec.documents import export
from computeshare.jobspec.documents.fields import job_fields
from computeshare.jobspec.spec import JobSpec

URL = "http://127.0.0.1:8000/"
HOSTILE = [
    "plain",
    'it\'s "quoted" $(reboot) `reboot` ${HOME} \\n',
    "-rf --yes",
    "--",
    "@/etc/passwd",
    "5",
    "null",
    '{"a": 1}',
    "ünïcode ✓ 🎉",
    "a=b; c | d > e & f * ? [g] ~ !h #i",
    "</pre><script>alert(1)</script>",
    "seen \u202e unseen \u200b \x85 \u2028 seen",
    "{x} %s {{y}}",
]
NUMBERS = st.floats(1e-6, 1, allow_subnormal=False)
OPTIMIZERS = st.one_of(
    st.fixed_dictionaries(
        {"name": st.just("SGD")},
        optional={"lr": NUMBERS, "momentum": st.floats(0, 0.99), "weight_decay": NUMBERS, "maximize": st.booleans()},
    ),
    st.fixed_dictionaries(
        {"name": st.just("Adam")}, optional={"betas": st.just([0.8, 0.99]), "amsgrad": st.just(True)}
    ),
)
STRATEGIES = st.one_of(
    st.fixed_dictionaries({"kind": st.just("sync")}, optional={"quorum": st.floats(0.5, 1), "backup": st.booleans()}),
    st.fixed_dictionaries(
        {"kind": st.just("async")}, optional={"buffer": st.integers(2, 9), "max_staleness": st.just(0)}
    ),
    st.fixed_dictionaries(
        {"kind": st.just("local")},
        optional={"inner_steps": st.integers(1, 9), "outer_lr": NUMBERS, "inner_optimizer": OPTIMIZERS},
    ),
)
SPECS = st.fixed_dictionaries(
    {"dataset": st.sampled_from(["digits", "mnist"]), "model": st.just("mlp")},
    optional={
        "name": st.sampled_from(HOSTILE) | st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20),
        "queue": st.sampled_from(["default", "mnist", "-", "_"]),
        "input": st.just([1, 16, 16]),
        "micro_batch": st.integers(1, 99),
        "rounds": st.none() | st.integers(1, 1000),
        "strategy": STRATEGIES,
        "codec": st.sampled_from(["auto", {"up": "float32"}, {"up": "int8", "down": "int8"}, {}]),
        "workers": st.sampled_from([{"max": 3}, {"min": 2}, {"min": 1, "max": 8}]),
        "augment": st.sampled_from([[], ["crop"], ["flip", "crop"]]),
        "stop": st.sampled_from([{"metric": "loss", "at": -0.5, "patience": 2}, {"patience": 3}]),
        "requires": st.sampled_from(
            [{"memory": "8GB", "labels": {"room": "attic", "floor": "2.5"}}, {"device": "cuda"}]
        ),
        "prefers": st.sampled_from([{}, {"labels": {"room": "attic"}}]),
        "seed": st.integers(0, 2**63 - 1),
        "checkpoint_every": st.sampled_from([0, 100, 7]),
        "keep": st.sampled_from([{}, {"last": 5}, {"best": 3, "every": 10}]),
    },
)


def echoed(spec: dict[str, Any]) -> dict[str, Any]:
    """The document as the API shows it, and any client reads it."""
    return dict(json.loads(JobSpec.model_validate(spec).model_dump_json()))


def from_curl(text: str) -> dict[str, Any]:
    arguments = shlex.split(text.replace("\\\n", ""))
    assert arguments[0] == "curl" and arguments[-1] == "http://127.0.0.1:8000/v1/jobs"
    return dict(json.loads(arguments[arguments.index("-d") + 1]))


def from_cli(text: str) -> dict[str, Any]:
    """What the command would send, as it tells itself."""
    program, *arguments = shlex.split(text)
    done = CliRunner().invoke(app, [*arguments, "--show", "json"])
    assert program == "computeshare" and done.exit_code == 0, done.output
    return dict(json.loads(done.stdout))


def from_python(text: str) -> dict[str, Any]:
    """What the program asks a control plane for."""
    asked: list[dict[str, Any]] = []

    class Recorded:
        """Stands where the control plane would: the calls that the program makes."""

        @property
        def jobs(self) -> "Recorded":
            return self

        def create(self, document: dict[str, Any] | None = None, **fields: Any) -> "Recorded":
            asked.append({**(document or {}), **fields})
            return self

        def wait(self) -> None:
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(computeshare, "ComputeShare", Recorded, raising=False)
        exec(text, {})
    (document,) = asked
    return document


@given(SPECS)
@pytest.mark.slow
def test_each_form_asks_for_the_same_job(spec: dict[str, Any]) -> None:
    document, wanted = echoed(spec), JobSpec.model_validate(spec)
    forms = (
        json.loads(export.as_json(document)),
        from_curl(export.as_curl(document, URL)),
        from_cli(export.as_cli(document)),
        from_python(export.as_python(document)),
    )
    for found in forms:
        assert JobSpec.model_validate(found) == wanted


@pytest.mark.parametrize("name", HOSTILE, ids=range(len(HOSTILE)))
def test_a_hostile_name_is_quoted_for_whatever_reads_it(name: str) -> None:
    document = echoed({"dataset": "digits", "model": "mlp", "name": name})
    for text in (export.as_curl(document, URL), export.as_cli(document), export.as_python(document)):
        assert text.replace("\n", "").isprintable()
    assert from_curl(export.as_curl(document, URL))["name"] == name
    assert from_cli(export.as_cli(document))["name"] == name
    assert from_python(export.as_python(document))["name"] == name


def test_what_equals_its_default_is_left_out() -> None:
    document = echoed({"dataset": "digits", "model": "mlp", "codec": {"up": "float32"}, "epochs": 2})
    assert export.shortened(document) == {
        "dataset": "digits",
        "model": "mlp",
        "epochs": 2,
        "codec": {"up": "float32"},
    }
    assert export.as_cli(document) == (
        "computeshare jobs create --dataset digits --model mlp --epochs 2 --codec-up float32"
    )


def test_what_follows_from_a_strategy_is_left_out_with_it() -> None:
    document = echoed({"dataset": "digits", "model": "mlp", "strategy": {"kind": "local", "inner_steps": 5}})
    assert document["micro_batches_per_round"] == 20
    assert export.shortened(document) == {
        "dataset": "digits",
        "model": "mlp",
        "strategy": {"kind": "local", "inner_steps": 5},
    }


def test_each_form_reads_as_one_would_write_it() -> None:
    document = echoed({"dataset": "digits", "model": "mlp", "optimizer": {"name": "Adam", "betas": [0.8, 0.99]}})
    assert export.as_cli(document) == (
        "computeshare jobs create --dataset digits --model mlp --optimizer Adam --set 'optimizer.betas=[0.8, 0.99]'"
    )
    assert export.as_python(document) == (
        "from computeshare import ComputeShare\n\ncs = ComputeShare()\njob = cs.jobs.create(\n"
        '    dataset="digits",\n    model="mlp",\n    optimizer={"name": "Adam", "betas": [0.8, 0.99]},\n'
        ")\njob.wait()\n"
    )
    curl = export.as_curl(document, URL).splitlines()
    assert curl[0] == 'curl -H "Authorization: Bearer $COMPUTESHARE_TOKEN" \\'
    assert curl[-1] == "    http://127.0.0.1:8000/v1/jobs"


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"strategy": {"kind": "rumour", "fan out": 3}, "class": 1},
        {"strategy": {"kind": []}, "codec": {"sideways": "x"}, "workers": 3},
        {"optimizer": {"lr": 1}, "strategy": None, "a b": {"": 0}},
    ],
    ids=["empty", "strategy", "unhashable", "odd"],
)
def test_a_document_of_another_release_is_shown_as_it_is(document: dict[str, Any]) -> None:
    wanted = {name: value for name, value in document.items() if value is not None}
    assert json.loads(export.as_json(document)) == wanted
    assert from_curl(export.as_curl(document, URL)) == wanted
    assert from_python(export.as_python(document)) == wanted
    assert shlex.split(export.as_cli(document))[:3] == ["computeshare", "jobs", "create"]


def test_every_flag_is_one_that_the_command_has() -> None:
    shown = CliRunner().invoke(app, ["jobs", "create", "--help"], env={"COLUMNS": "200"}).output
    assert [flag for flag in (one.flag for one in job_fields()) if flag not in shown] == []
