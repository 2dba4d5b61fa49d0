"""A job's requirements and preferences for machines: memory, device and labels. Pure."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field, field_validator

from computeshare.errors import SettingsError
from computeshare.jobspec.part import Part

NEEDS = ("requires", "prefers")
"""The fields of a JobSpec that hold `Needs`."""
MOST_LABELS = 16
_WORD = re.compile(r"[A-Za-z0-9._-]{1,64}")
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,15})?|\.\d{1,15})\s*(|k|m|g|t)(i?)b?", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}


def parse_size(text: str) -> int:
    """Bytes from words such as `8GB`, `1.5g` or `512MiB` (a k is 1000, a Ki 1024). Raises SettingsError."""
    found = _SIZE.fullmatch(text.strip())
    if not found:
        raise SettingsError(f"{text!r} is not a size: give for example 8GB, 1.5GB or 512MiB")
    return int(float(found[1]) * (1024 if found[3] else 1000) ** _POWERS[found[2].lower()])


def size_text(count: int) -> str:
    """A number of bytes for people: `8.0 GB`, `512 MB`."""
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"


def device_type(described: str) -> str:
    """The kind of a device in words such as `cpu (x86_64)` or `cuda:1`."""
    return re.split("[ :]", described, maxsplit=1)[0]


def parse_labels(texts: Iterable[str]) -> dict[str, str]:
    """Labels from texts such as `room=attic`. Raises SettingsError: a text is no label, or there are too many."""
    labels: dict[str, str] = {}
    for text in texts:
        name, _, value = text.strip().partition("=")
        if not (_NAME.fullmatch(name) and _WORD.fullmatch(value)) or name in FIELDS:
            raise SettingsError(f"{text!r} is not a label: give NAME=VALUE, such as room=attic; {_ALLOWED}")
        if labels.setdefault(name, value) != value:
            raise SettingsError(f"label {name} has two values, {labels[name]} and {value}: give one")
    if len(labels) > MOST_LABELS:
        raise SettingsError(f"a worker has at most {MOST_LABELS} labels, not {len(labels)}")
    return labels


_ALLOWED = "letters, digits, - and _ (in a value also .), 64 at most, are allowed, and no name memory or device"


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """A worker's properties: memory for a job in bytes, its device in words, and its owner's labels."""

    memory_bytes: int
    device: str
    labels: Mapping[str, str] = field(default_factory=dict)


class Needs(Part):
    """Properties that a machine has or lacks. Fields left out ask for nothing."""

    memory: str | None = Field(
        None,
        max_length=40,
        description="least memory for a job, such as 8GB: the GPU's own if it has any, else the machine's, up to the "
        "limit that its owner set",
    )
    device: Literal["cpu", "cuda", "mps"] | None = Field(None, description="what the worker computes with")
    labels: dict[str, str] = Field(
        {}, max_length=MOST_LABELS, description='that the worker\'s owner gave it, such as {"room": "attic"}'
    )

    @field_validator("memory", "labels")
    @classmethod
    def _readable(cls, value: Any) -> Any:
        try:
            if isinstance(value, dict):
                return parse_labels(f"{name}={one}" for name, one in value.items())
            if value is not None:
                parse_size(value)
        except SettingsError as error:
            raise ValueError(str(error)) from error
        return value

    @property
    def told(self) -> str:
        """The needs in words: `8.0 GB of memory, device cuda and label room=attic`; empty if there are none."""
        parts = [f"{size_text(parse_size(self.memory))} of memory"] if self.memory else []
        parts += [f"device {self.device}"] if self.device else []
        parts += [f"label {name}={value}" for name, value in sorted(self.labels.items())]
        return _joined(parts)

    def lacking(self, machine: MachineFacts) -> list[str]:
        """In words, each need that a machine does not meet."""
        found = []
        if self.memory and machine.memory_bytes < parse_size(self.memory):
            asked = size_text(parse_size(self.memory))
            found.append(f"has {size_text(machine.memory_bytes)} of memory for a job, not {asked}")
        if self.device and device_type(machine.device) != self.device:
            found.append(f"computes with {device_type(machine.device)}, not {self.device}")
        for name, value in sorted(self.labels.items()):
            if name not in machine.labels:
                found.append(f"has no label {name}={value}")
            elif machine.labels[name] != value:
                found.append(f"has label {name}={machine.labels[name]}, not {name}={value}")
        return found

    def unmet(self, machines: Sequence[MachineFacts]) -> str:
        """The needs that no machine meets, in words; presumes that none of these machines meets all needs."""
        found = []
        if missing := [n for n, v in sorted(self.labels.items()) if all(m.labels.get(n) != v for m in machines)]:
            found.append(f"no worker has label {_joined([f'{name}={self.labels[name]}' for name in missing], 'or')}")
        if self.device and all(device_type(machine.device) != self.device for machine in machines):
            found.append(f"no worker computes with {self.device}")
        largest = max(machine.memory_bytes for machine in machines)
        if self.memory and largest < parse_size(self.memory):
            found.append(f"the largest has {size_text(largest)} for a job")
        return "; ".join(found) or "no worker has all of it"

    def met(self, machine: MachineFacts) -> int:
        """The number of these needs that a machine meets."""
        return bool(self.memory) + bool(self.device) + len(self.labels) - len(self.lacking(machine))


FIELDS = tuple(name for name in Needs.model_fields if name != "labels")


def parse_need(text: str) -> tuple[str, str]:
    """The path below `Needs` and the value of a text such as `memory=8GB` or `room=attic`. Raises ValueError."""
    name, equals, value = (part.strip() for part in text.partition("="))
    if not equals or not _NAME.fullmatch(name):
        raise ValueError(f"{text!r}: give memory=8GB, device=cuda or a label such as room=attic")
    return (name if name in FIELDS else f"labels.{name}"), value


def need_texts(needs: Mapping[str, Any] | None) -> list[str]:
    """The needs of a document as `parse_need` reads them."""
    if not needs:
        return []
    own = [(name, needs[name]) for name in FIELDS if needs.get(name)]
    return [f"{name}={value}" for name, value in (*own, *(needs.get("labels") or {}).items())]


def _joined(parts: Sequence[str], word: str = "and") -> str:
    return f" {word} ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:])))
