"""`computeshare export`."""

from pathlib import Path
from typing import Annotated

import typer

from computeshare.cli.connection import (
    Home,
    JobId,
    Json,
    Url,
    Version,
    keep_existing,
    output_option,
    recipe_code_option,
)
from computeshare.cli.jobs.export import open_output
from computeshare.client import ComputeShare
from computeshare.client.exports import SUFFIXES, Format
from computeshare.terminal.output import console, print_json, size, target

CARD = "README.md"


def export(
    job_id: JobId,
    form: Annotated[
        Format,
        typer.Option(
            "--format", help="safetensors; state_dict: a .pt file for torch.load; onnx: needs computeshare\\[onnx]."
        ),
    ] = "safetensors",
    version: Version = "latest",
    output: Annotated[Path | None, output_option("JOB-vN.safetensors, .pt or .onnx")] = None,
    recipe: Annotated[str | None, recipe_code_option("with your rights. Not for safetensors")] = None,
    card: Annotated[bool, typer.Option("--card", help=f"Also write a model card beside the file: {CARD}.")] = False,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace existing files.")] = False,
    url: Url = None,
    home: Home = None,
    as_json: Json = False,
) -> None:
    """Write a version's model to a file for other programs."""
    with ComputeShare(url, home=home) as cs:
        job = cs.jobs.get(job_id)
        checkpoint = job.checkpoint(version)
        path = target(output, f"{job_id}-v{checkpoint['version']}{SUFFIXES[form]}")
        for existing in (path, *([path.with_name(CARD)] if card else [])):
            keep_existing(existing, force)
        with console(stderr=True).status(f"exporting version {checkpoint['version']}"):
            text = job.model_card(path.name, checkpoint["version"]) if card else ""
            job.export(path, form, checkpoint["version"], recipe)
            if card:
                with open_output(path.with_name(CARD)) as file:
                    file.write(text)
    written = path.stat().st_size
    if as_json:
        about = {
            "path": str(path),
            "format": form,
            "bytes": written,
            "card": str(path.with_name(CARD)) if card else None,
        }
        print_json({**about, "version": checkpoint["version"], "sha256": checkpoint["sha256"]})
    else:
        console().print(f"{path}: version {checkpoint['version']}, {size(written)}", markup=False)
