"""Recipes over REST."""

from typing import Annotated

from fastapi import APIRouter, Path, Response

from api.deps import RecipesDep
from api.recipes.schemas import RecipeDetail, RecipeList, RecipePublic, RecipeRequest
from computeshare.tasks.recipes.bundle import MOST_BYTES

router = APIRouter(prefix="/v1/recipes", tags=["recipes"])

Digest = Annotated[str, Path(max_length=100, description="the recipe's digest, `sha256:` and 64 hex digits")]


@router.post("", status_code=201, max_body_size=8 * MOST_BYTES, responses={200: {"model": RecipePublic}})
def create_recipe(request: RecipeRequest, service: RecipesDep, response: Response) -> RecipePublic:
    """Add a recipe, which jobs then name by its digest. 200: the same files were added before. No code is run."""
    recipe, is_new = service.add(request)
    if not is_new:
        response.status_code = 200
    response.headers["Location"] = f"/v1/recipes/{recipe.digest}"
    return recipe


@router.get("")
def list_recipes(service: RecipesDep) -> RecipeList:
    """All recipes, newest first."""
    return service.list()


@router.get("/{digest}")
def show_recipe(digest: Digest, service: RecipesDep) -> RecipeDetail:
    """A recipe and its files."""
    return service.show(digest)


@router.delete("/{digest}", status_code=204, response_class=Response)
def delete_recipe(digest: Digest, service: RecipesDep) -> None:
    """Delete a recipe; 409 while a job that has not ended trains it."""
    service.delete(digest)
