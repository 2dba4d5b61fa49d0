"""The base of all objects within a JobSpec, and errors that name a field within them."""

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError


class Part(BaseModel):
    """An object within a JobSpec. Unknown fields are errors; "32" and true are not accepted as numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def error_at(title: str, field: str | tuple[str, ...], message: str) -> ValidationError:
    """A ValidationError for `field` (or a field within it), where pydantic would name the whole object."""
    kind = PydanticCustomError("value_error", "{text}", {"text": message})
    loc = (field,) if isinstance(field, str) else field
    return ValidationError.from_exception_data(title, [InitErrorDetails(type=kind, loc=loc, input=None)])
