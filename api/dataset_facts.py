"""The facts of a data set of Hugging Face, found out when a job is created."""

from pathlib import Path

from pydantic import ValidationError

from api.errors import InvalidFields
from computeshare.errors import DatasetError
from computeshare.jobspec.spec import JobSpec
from computeshare.tasks.images.datasets import hugging_face


def completed(spec: JobSpec, data_dir: Path) -> JobSpec:
    """The specification with the facts of its data set, found in `data_dir` or on the Hub, and checked with them.

    Raises: InvalidFields: the data set cannot be found or used, or the job cannot be trained on it.
    """
    if spec.dataset is None or spec.dataset_args is None or not spec.task.needs_facts:
        return spec
    try:
        args = hugging_face.completed(spec.dataset, spec.dataset_args, data_dir)
        document = spec.model_dump(mode="json", exclude=set(spec.strategy.implied))
        return JobSpec.model_validate(document | {"dataset_args": args.model_dump(mode="json")})
    except DatasetError as error:
        raise InvalidFields.at(f"{spec.dataset}: {error}", "dataset") from error
    except ValidationError as error:
        raise InvalidFields.of(error) from error
