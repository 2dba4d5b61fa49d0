"""`computeshare generate`."""

import itertools
import sys
from typing import Annotated

import typer

from computeshare.cli.connection import Home, JobId, Json, Url, Version
from computeshare.client import ComputeShare
from computeshare.errors import SpecError
from computeshare.terminal.output import console, print_json


def generate(
    job_id: JobId,
    prompt: Annotated[str, typer.Option(metavar="TEXT", help="The text to continue.")] = "\n",
    tokens: Annotated[int, typer.Option(min=1, max=1_000_000, metavar="N", help="Characters to generate.")] = 200,
    temperature: Annotated[
        float, typer.Option(min=0, max=100, help="0: always the likeliest character; 1: as the model says.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="The same seed gives the same text.")] = 0,
    version: Version = "latest",
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Continue a text with a job's language model."""
    with ComputeShare(url, home=home) as cs, console(stderr=True).status("loading the model"):
        job = cs.jobs.get(job_id)
        if job.spec["recipe"]:
            raise SpecError(
                "a recipe's model generates no text here: use it in Python (`job.module(recipe=...)`), or create a job "
                "with the model gpt"
            )
        model = job.trained(version)
        characters = itertools.islice(model.generate(prompt, temperature, seed), tokens)
    if as_json:
        about = {"id": job_id, "version": model.version, "prompt": prompt}
        print_json({**about, "text": "".join(characters)})
        return
    for character in itertools.chain(prompt, characters):
        sys.stdout.write(character)
        sys.stdout.flush()
    sys.stdout.write("\n")
