"""A stage of a script's model on disk: its weights, its optimizer's state and torch's generator, after some steps."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from computeshare.errors import SettingsError
from computeshare.runtime.durability import flush


@dataclass(frozen=True)
class StageSaves:
    """The saves of one stage in a folder, `stage-STAGE-STEPS.pt`; without a folder, none."""

    folder: Path | None
    stage: int
    module: nn.Module
    optimizer: torch.optim.Optimizer | None

    def steps(self) -> list[int]:
        """The numbers of steps after which the stage was saved, ascending."""
        found = self.folder.glob(f"stage-{self.stage}-*.pt") if self.folder else ()
        return sorted(int(one.stem.rpartition("-")[2]) for one in found)

    def save(self, steps: int, since: int) -> None:
        """Save the stage as it is after so many steps, and remove saves of fewer steps than `since`, the last that all
        stages have: while all stages save, one of them may end before it has. Raises SettingsError: there is no folder,
        it cannot be written, or it has saves of more steps.
        """
        path = self._path(steps)
        if later := [one for one in self.steps() if one > steps]:
            raise SettingsError(
                f"stage {self.stage} was not saved: {self.folder} has a save of {later[-1]} steps, and this script has "
                f"taken {steps}: begin with `await stages.resume()`, or choose another folder"
            )
        state = {"module": self.module.state_dict(), "generator": torch.get_rng_state()}
        state |= {"optimizer": self.optimizer.state_dict()} if self.optimizer else {}
        partial = path.with_suffix(".partial")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state, partial)
            flush(partial)
            os.replace(partial, path)
            flush(path.parent)
            for old in self.steps():
                if old < since:
                    self._path(old).unlink(missing_ok=True)
        except (OSError, RuntimeError) as error:  # torch raises the latter where the disk is full
            with contextlib.suppress(OSError):
                partial.unlink()
            raise SettingsError(f"stage {self.stage} was not saved in {self.folder}: {error}") from error

    def load(self, steps: int) -> None:
        """Go back to a save, and remove later ones. Raises SettingsError: there is no folder; OSError."""
        state = torch.load(self._path(steps), weights_only=True)
        self.module.load_state_dict(state["module"])
        torch.set_rng_state(state["generator"])
        if self.optimizer:
            self.optimizer.load_state_dict(state["optimizer"])
            self.optimizer.zero_grad()
        for later in self.steps():
            if later > steps:
                self._path(later).unlink(missing_ok=True)

    def _path(self, steps: int) -> Path:
        if not self.folder:
            raise SettingsError(f"stage {self.stage} was not saved: pass a folder to connect() and to each serve()")
        return self.folder / f"stage-{self.stage}-{steps}.pt"


def newest_of_all(saved: list[list[int]]) -> int | None:
    """The largest number of steps that each stage has saved; None: there is none."""
    common = set[int].intersection(*(set(one) for one in saved))
    return max(common, default=None)
