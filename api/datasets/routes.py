"""Users' data sets over REST."""

from typing import Annotated

from fastapi import APIRouter, Path, Response

from api.datasets.samples import SplitName
from api.datasets.schemas import DatasetList, DatasetPublic, DatasetRequest
from api.deps import DatasetsDep, SamplesDep

router = APIRouter(prefix="/v1/datasets", tags=["datasets"])

Name = Annotated[str, Path(max_length=64, description="the data set's name")]
Index = Annotated[int, Path(ge=0, lt=2**40, description="the image's number in its split, from 0")]
PNG = "image/png"
UNCHANGED = "private, max-age=86400"
"""For a day a browser may keep an image: its address has the bundle's digest."""


@router.post("", status_code=201, responses={200: {"model": DatasetPublic}})
def create_dataset(request: DatasetRequest, service: DatasetsDep, response: Response) -> DatasetPublic:
    """Add a data set whose prepared files were uploaded as a bundle; `computeshare data add` does both. 200: the same
    data set was added before.
    """
    dataset, is_new = service.create(request)
    if not is_new:
        response.status_code = 200
    response.headers["Location"] = f"/v1/datasets/{dataset.name}"
    return dataset


@router.get("")
def list_datasets(service: DatasetsDep) -> DatasetList:
    """All data sets that users added, by name."""
    return service.list()


@router.get("/{name}")
def show_dataset(name: Name, service: DatasetsDep) -> DatasetPublic:
    """A data set by its name."""
    return service.show(name)


@router.delete("/{name}", status_code=204, response_class=Response)
def delete_dataset(name: Name, service: DatasetsDep) -> None:
    """Remove a data set that no job uses which is not over."""
    service.remove(name)


@router.get(
    "/{name}/samples/{split}/{index}",
    response_class=Response,
    responses={200: {"content": {PNG: {"schema": {"type": "string", "format": "binary"}}}}},
)
def show_sample(name: Name, split: SplitName, index: Index, service: DatasetsDep, samples: SamplesDep) -> Response:
    """An image of a data set, as a small PNG."""
    picture = samples.thumbnail(service.show(name), split, index)
    return Response(picture, media_type=PNG, headers={"Cache-Control": UNCHANGED})
