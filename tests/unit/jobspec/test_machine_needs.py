"""What a job asks of a machine: as it is typed, what a machine lacks, and what nobody has."""

from typing import Any

import pytest
from pydantic import ValidationError

from computeshare.errors import SettingsError
from computeshare.jobspec.machine_needs import MachineFacts, Needs, need_texts, parse_labels, parse_need
from computeshare.jobspec.spec import JobSpec

MAC = MachineFacts(8_000_000_000, "mps", {"room": "attic"})
PC = MachineFacts(4_000_000_000, "cuda:1", {"room": "cellar", "floor": "-1"})


def needs(**fields: Any) -> Needs:
    return Needs.model_validate(fields)


def test_a_machine_lacks_what_it_has_too_little_or_another_of() -> None:
    asked = needs(memory="8GB", device="mps", labels={"room": "attic", "floor": "-1"})
    assert asked.lacking(MAC) == ["has no label floor=-1"]
    assert asked.lacking(PC) == [
        "has 4.0 GB of memory for a job, not 8.0 GB",
        "computes with cuda, not mps",
        "has label room=cellar, not room=attic",
    ]
    assert needs().lacking(PC) == [] and needs(memory="4GB", device="cuda").lacking(PC) == []
    assert (asked.met(MAC), asked.met(PC), needs().met(MAC)) == (3, 1, 0)


def test_what_nobody_has_is_said_of_all_of_them() -> None:
    both = [MAC, PC]
    assert needs(memory="16GB", labels={"room": "hall"}).unmet(both) == (
        "no worker has label room=hall; the largest has 8.0 GB for a job"
    )
    assert needs(device="cpu", labels={"a": "1", "b": "2"}).unmet(both) == (
        "no worker has label a=1 or b=2; no worker computes with cpu"
    )
    assert needs(memory="8GB", labels={"room": "cellar"}).unmet(both) == "no worker has all of it"


def test_needs_are_told_in_words() -> None:
    told = needs(memory="8GB", device="cuda", labels={"room": "attic"}).told
    assert told == "8.0 GB of memory, device cuda and label room=attic"
    assert needs(memory="512MiB").told == "537 MB of memory" and needs().told == ""


def test_needs_are_typed_as_pairs_and_written_so() -> None:
    assert parse_need("memory=8GB") == ("memory", "8GB")
    assert parse_need(" room = attic") == ("labels.room", "attic")
    document = needs(memory="8GB", labels={"room": "attic", "floor": "2"}).model_dump()
    assert need_texts(document) == ["memory=8GB", "room=attic", "floor=2"]
    assert need_texts(None) == need_texts({}) == []
    for text in ("attic", "=attic", "a.b=1", ""):
        with pytest.raises(ValueError, match="give memory=8GB"):
            parse_need(text)


@pytest.mark.parametrize("text", ["room", "room=", "=attic", "room=at tic", "memory=8GB", "a" * 65 + "=1", "r;m=1"])
def test_a_label_that_is_none_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(SettingsError, match="such as room=attic"):
        parse_labels([text])


def test_labels_have_one_value_each_and_are_not_many() -> None:
    assert parse_labels(["room=attic", "cuda=12.4", "room=attic"]) == {"room": "attic", "cuda": "12.4"}
    with pytest.raises(SettingsError, match="two values, attic and hall"):
        parse_labels(["room=attic", "room=hall"])
    with pytest.raises(SettingsError, match="at most 16 labels, not 17"):
        parse_labels(f"n{number}=1" for number in range(17))


@pytest.mark.parametrize(
    ("wrong", "place", "message"),
    [
        ({"memory": "much"}, ("requires", "memory"), "give for example 8GB"),
        ({"memory": "9" * 30 + "GB"}, ("requires", "memory"), "is not a size"),
        ({"device": "tpu"}, ("requires", "device"), "'cpu', 'cuda' or 'mps'"),
        ({"labels": {"room": "at tic"}}, ("requires", "labels"), "is not a label"),
        ({"labels": {"memory": "8GB"}}, ("requires", "labels"), "is not a label"),
        ({"labels": {f"n{number}": "1" for number in range(17)}}, ("requires", "labels"), "16"),
        ({"disk": "1GB"}, ("requires", "disk"), "not permitted"),
    ],
)
def test_a_job_cannot_ask_for_what_does_not_exist(wrong: Any, place: tuple[str, ...], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        JobSpec.model_validate({"dataset": "digits", "model": "mlp", "requires": wrong})
    (error,) = caught.value.errors()
    assert error["loc"] == place and message in error["msg"]
