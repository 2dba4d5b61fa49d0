"""The base of all objects within a JobSpec, and errors that name a field within them."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError

from computeshare.types import plain_message

_BRANCH = re.compile(r"literal\[.*\]|constrained-\w+|int|float|str|bool")
"""Names of a union's branches, which pydantic puts into an error's place though they are no fields."""
_OBJECT = "send a JSON object"
_IN_JSON = {
    "missing": "must be given",
    "tuple_type": "send a JSON list",
    "dict_type": _OBJECT,
    "model_type": _OBJECT,
    "model_attributes_type": _OBJECT,
}
"""Messages that replace pydantic's, by the type of error."""


class Part(BaseModel):
    """An object within a JobSpec. Unknown fields are errors; "32" and true are not accepted as numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def error_at(title: str, field: str | tuple[str, ...], message: str) -> ValidationError:
    """A ValidationError for `field` (or a field within it), where pydantic would name the whole object."""
    kind = PydanticCustomError("value_error", "{text}", {"text": message})
    loc = (field,) if isinstance(field, str) else field
    return ValidationError.from_exception_data(title, [InitErrorDetails(type=kind, loc=loc, input=None)])


def missing(title: str, *fields: str) -> ValidationError:
    """The ValidationError of fields that must be given."""
    lines = [InitErrorDetails(type="missing", loc=(field,), input=None) for field in fields]
    return ValidationError.from_exception_data(title, lines)


def plain_errors(errors: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """pydantic's errors in the words of JSON; those of a union's branches are one error, whose place is the field's."""
    found: list[dict[str, Any]] = []
    for each in errors:
        place = tuple(part for part in each["loc"] if not (isinstance(part, str) and _BRANCH.fullmatch(part)))
        before = found[-1] if found else None
        if before and before["loc"] == place != tuple(each["loc"]):
            before["msg"] += ", or " + plain_message(each["msg"]).removeprefix("must be ")
            expected = [(one.get("ctx") or {}).get("expected") for one in (before, each)]
            before["ctx"] = {"expected": ", ".join(filter(None, expected))}
        else:
            found.append({**each, "loc": place, "msg": _IN_JSON.get(each["type"]) or plain_message(each["msg"])})
    return found
