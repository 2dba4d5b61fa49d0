"""What the objects within a JobSpec have in common: how strictly they are read, and how their errors name a field."""

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import InitErrorDetails, PydanticCustomError


class Part(BaseModel):
    """An object within a JobSpec: unknown fields are errors, and "32" or true are no numbers."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def error_at(title: str, field: str | tuple[str, ...], message: str) -> ValidationError:
    """An error that names a field (or one within it) where pydantic would name the whole object."""
    kind = PydanticCustomError("value_error", "{text}", {"text": message})
    loc = (field,) if isinstance(field, str) else field
    return ValidationError.from_exception_data(title, [InitErrorDetails(type=kind, loc=loc, input=None)])
