"""A recipe's model and data in a process of their own: the side of the seat, or of the evaluator."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import psutil
import structlog

from computeshare.confinement import scratch
from computeshare.confinement.methods import method
from computeshare.confinement.process import start
from computeshare.confinement.watch import Watch, watch
from computeshare.errors import RecipeError, RecipeUnfit
from computeshare.jobspec.sampling_plan import Plan
from computeshare.jobspec.spec import JobSpec
from computeshare.jobspec.tasks.recipes import RecipeTask
from computeshare.runtime.log_lines import Budget
from computeshare.tasks.recipes import packages
from computeshare.tasks.recipes.bundle import Bundle
from computeshare.tensors.layout import Layout, Weights
from computeshare.training import devices
from computeshare.training.memory import machine_bytes, private_bytes
from computeshare.training.recipe_process import messages
from computeshare.training.recipe_process.channel import SocketChannel
from computeshare.training.recipe_process.connection import STEP_LIMIT_S, ProcessConnection
from computeshare.training.recipe_process.replica import RecipeReplica, walk
from computeshare.training.recipe_process.shared_vectors import SharedVectors, allocate
from computeshare.training.work_units import Compute, SelfTestResult
from computeshare.types import Kind, Precision, Vector, plain

if TYPE_CHECKING:
    from computeshare.tasks.metrics import SplitScore

Part = Literal["train", "validation", "test"]
MEMORY_SHARE = 0.9
"""The share of the machine's memory that a recipe's process may take where its owner names no limit."""
END_S = 5.0
"""How long a process may take to end once nothing is asked of it any more."""
MOST_LINES_PER_S, MOST_LINES_AT_ONCE, LONGEST_LINE = 2.0, 50, 500
"""Limits on the log of the lines that a recipe prints; a line longer than `LONGEST_LINE` bytes is split."""
_PREFIX = "recipe-process-"
log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class RecipeFiles:
    """Files that a recipe's process reads.

    Args:
        bundle: the recipe's own files.
        initial: the folder with the files of the initial state.
        data: the folder with the job's data set; None: the job names none.
    """

    bundle: Bundle
    initial: Path
    data: Path | None = None


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    """Limits on a recipe's process; `memory_bytes` of 0: `MEMORY_SHARE` of the machine's memory."""

    memory_bytes: int = 0
    step_s: float = STEP_LIMIT_S
    open_s: float = STEP_LIMIT_S
    """To import the recipe, to build its model, and to open its data."""
    unconfined: bool = False
    """Whether the process may run where nothing can confine it, with the rights of this one."""


class RecipeProcess:
    """A job's recipe in a confined process: a `Computation` for a seat, and a `Scorer` for the evaluator.

    It ends with the thread that opened it. Raises RecipeError from every method once the process has failed.
    """

    SERVER: ClassVar[str] = "computeshare.training.recipe_process.server"
    """The module that answers in the process."""

    def __init__(
        self, spec: JobSpec, files: RecipeFiles, device: str | None = None, limits: ProcessLimits = ProcessLimits()
    ) -> None:
        """Start the process; it imports the recipe at the first request.

        Raises: RecipeError: the files are not the recipe that the specification names. Unconfined.
        """
        task = spec.task
        assert isinstance(task, RecipeTask)
        if files.bundle.digest != task.recipe:
            raise RecipeError("the recipe's files are not those that the job names: they were changed on their way")
        self._spec, self._task, self._layout, self._limits = spec, task, task.layout, limits
        self._parts: set[Part] = set()
        """Those that are open."""
        self._closing = contextlib.ExitStack()
        try:
            self._start(files, device)
        except BaseException:
            self.close()
            raise
        self._open = messages.Open(
            spec=spec.model_dump_json(),
            device=device,
            recipe=str(self._recipe),
            initial=str(files.initial),
            data=str(files.data) if files.data else None,
            part="train",
        )

    def _start(self, files: RecipeFiles, device: str | None) -> None:
        _remove_left()
        folder = self._closing.enter_context(scratch.temporary(f"{_PREFIX}{os.getpid()}-"))
        self._recipe, own = folder / "recipe", folder / "scratch"
        own.mkdir()
        files.bundle.write(self._recipe)
        ours, theirs = socket.socketpair()
        channel, descriptor = SocketChannel(ours), allocate(self._layout)
        self._closing.callback(channel.close)
        package = packages.folder_of(files.bundle.package) if files.bundle.package else None
        memory_bytes = self._limits.memory_bytes or int(MEMORY_SHARE * machine_bytes())
        try:
            process = start(
                [sys.executable, "-m", self.SERVER, str(theirs.fileno()), str(descriptor)],
                scratch=own,
                readable=[path for path in (self._recipe, files.initial, files.data, package) if path],
                environment={"PYTHONPATH": str(package)} if package else {},
                pass_fds=(theirs.fileno(), descriptor),
                gpu=not (device or devices.guess()).startswith("cpu"),
                memory_bytes=memory_bytes,
                forks=self._spec.compile,
                by=method() if self._limits.unconfined else None,
            )
            self._shared = SharedVectors(descriptor, self._layout)
        finally:
            theirs.close()
            os.close(descriptor)
        self._ending = _Ending(process, watch(process, memory_bytes, scratch=own))
        self._closing.callback(self._ending.end)
        self._connection = ProcessConnection(channel, self._ending, self._limits.step_s)

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def identity(self) -> Mapping[str, Any]:
        about = {"recipe": self._task.recipe, "args": dict(self._task.arguments)}
        package = self._task.recipe_facts.package
        return about | {"package": package} if package else about

    @property
    def frozen(self) -> str:
        return self._task.recipe_facts.frozen

    @property
    def built(self) -> None:
        return None

    @property
    def device(self) -> str:
        return self._opened.device

    @property
    def kind(self) -> Kind:
        return dict(self._opened.kind)

    @property
    def memory(self) -> "ProcessMemory":
        return self._memory

    def open(self, part: Part = "train") -> Self:
        """Import the recipe, build its module and open a part of its data.

        Raises: RecipeError: that fails, or gives something else than where the job was created; SettingsError: there is
            no such device.
        """
        request = self._open.model_copy(update={"part": part})
        opened, _ = self._connection.ask(request, messages.Opened, limit_s=self._limits.open_s)
        self._opened, self._memory = opened, ProcessMemory(opened)
        self._parts.add(part)
        return self

    def test(self) -> SelfTestResult:
        return self._tested(messages.Test())

    def _tested(self, request: messages.Head, limit_s: float = 0.0) -> SelfTestResult:
        told, _ = self._connection.ask(request, messages.Tested, limit_s=limit_s)
        self._memory.hear(told.memory)
        return SelfTestResult(told.error, told.seconds, told.saved_bytes, plain(told.trouble))

    def saved_bytes_in_bfloat16(self) -> int:
        return self._connection.ask(messages.MeasureSaved(), messages.Number)[0].value

    def trial(self, spec: JobSpec, precision: Precision) -> Compute:
        self._connection.ask(messages.Try(spec=spec.model_dump_json(), precision=precision), messages.Done)

        def compute(micro_batches: Sequence[int]) -> tuple[Vector, Vector]:
            update = walk(self._connection, self._shared, micro_batches, precision)
            return update.vector, update.buffers

        return compute

    def replica(self, spec: JobSpec) -> RecipeReplica:
        built, _ = self._connection.ask(messages.Build(spec=spec.model_dump_json()), messages.Built)
        about = self._connection, self._shared, self._layout
        return RecipeReplica(*about, lambda unit: self._steps(spec.plan, unit), built, self._memory.hear_peak)

    def _steps(self, plan: Plan, unit: int) -> int:
        """The most steps that a unit takes."""
        return len(plan.micro_batches(unit))

    def score(self, part: Part, weights: Weights, batch: int) -> "SplitScore":
        """As `Scorer.score`."""
        from computeshare.tasks.metrics import SplitScore

        self._layout.check(weights)
        if part not in self._parts:
            self.open(part)
        self._shared.put(weights)
        facts = self._task.recipe_facts
        steps = 1 + (facts.test if part == "test" else facts.train)
        told, _ = self._connection.ask(messages.Score(part=part, batch=batch), messages.Scored, steps=steps)
        return SplitScore(told.loss, told.metrics, told.samples, told.classes)

    def sample(self) -> None:
        """None: a recipe generates no text."""

    def close(self) -> None:
        """End the process, and remove its files."""
        self._closing.close()


class ProcessMemory:
    """The memory of a recipe's process and of this one, which computes nothing itself; a `MemoryMeter`.

    What both have mapped, vectors and libraries, is the recipe's process's alone. This one's peak is the most that was
    found whenever somebody looked.
    """

    def __init__(self, opened: messages.Opened) -> None:
        self._told, self._is_cpu = opened.memory, opened.device_type == "cpu"
        self.device_type: str = opened.device_type
        self._own_peak = 0

    def hear(self, told: messages.Memory) -> None:
        """Record what the process has told of its memory."""
        self._told = told

    def hear_peak(self, peak_bytes: int) -> None:
        """Record the process's peak."""
        self._told = self._told.model_copy(update={"peak": peak_bytes})
        self._own_bytes()

    def resident_bytes(self) -> int:
        return self._told.resident + self._own_bytes()

    def peak_bytes(self) -> int:
        self._own_bytes()
        return self._told.peak + self._own_peak

    def _own_bytes(self) -> int:
        own = private_bytes() if self._is_cpu else 0
        self._own_peak = max(self._own_peak, own)
        return own

    def room_bytes(self) -> int:
        return self._told.room


class _Ending:
    """The end of a process: why it came, and what the process printed before."""

    def __init__(self, process: "subprocess.Popen[bytes]", watched: Watch) -> None:
        self._process, self._watched = process, watched
        self._last: deque[str] = deque(maxlen=1)
        self._reader = threading.Thread(target=self._read, name="recipe-output", daemon=True)
        self._reader.start()

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def error(self) -> RecipeError:
        """Says why the process ended; it is ended now if it has not."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self.end()
        self._reader.join(END_S)
        last = f"; the last that it printed: {self._last[0]}" if self._last else ""
        why = f"the recipe's process {self._watched.why()}{last}"
        return RecipeUnfit(why) if self._watched.lacks_room else RecipeError(why)

    def _read(self) -> None:
        budget = Budget(MOST_LINES_PER_S, MOST_LINES_AT_ONCE)
        output = self._process.stdout
        assert output
        with output:
            while line := output.readline(LONGEST_LINE):
                if text := plain(line.decode(errors="replace").strip()):
                    self._last.append(text)
                    if budget.spend():
                        log.info("the recipe printed", line=text)


def _remove_left() -> None:
    """Remove the folders of processes of this user that were killed before they could."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            if owner.isdigit() and not psutil.pid_exists(int(owner)) and folder.lstat().st_uid == os.getuid():
                scratch.remove(folder)
