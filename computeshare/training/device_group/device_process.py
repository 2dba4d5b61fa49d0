"""A job's computation on a further device of the worker, in a process of its own, without a recipe's confinement.

torch's generator of random numbers and its number of threads are a process's, and so is the interpreter's lock.
"""

import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

from computeshare.errors import RecipeError
from computeshare.jobspec.spec import JobSpec
from computeshare.training.computation import LocalComputation
from computeshare.training.recipe_process import messages
from computeshare.training.recipe_process.channel import SocketChannel
from computeshare.training.recipe_process.connection import ProcessConnection
from computeshare.training.recipe_process.process import ProcessMemory
from computeshare.training.recipe_process.replica import RecipeReplica
from computeshare.training.recipe_process.shared_vectors import SharedVectors, allocate
from computeshare.training.work_units import SelfTestResult

SERVER = "computeshare.training.device_group.server"
LIMIT_S = 24 * 3600.0
"""The longest time for a step: as long as the seat's own device may take."""
END_S = 5.0


class DeviceProcess:
    """A job's computation on one device; a `group.Member`."""

    def __init__(self, spec: JobSpec, device: str, data_dir: Path, bundles_dir: Path, like: LocalComputation) -> None:
        """Start the process. `like`: the same job's computation in this process.

        Raises: SettingsError: there is no such device; RecipeError: the process ended.
        """
        self._layout, self._closing = like.layout, contextlib.ExitStack()
        ours, theirs = socket.socketpair()
        descriptor = allocate(like.layout)
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", SERVER, str(theirs.fileno()), str(descriptor)],
                pass_fds=(theirs.fileno(), descriptor),
                stdin=subprocess.DEVNULL,
                process_group=0,  # a seat that is asked to leave finishes its units first
            )
            self._shared = SharedVectors(descriptor, like.layout)
        finally:
            theirs.close()
            os.close(descriptor)
        ending = _Ending(process, device)
        self._closing.callback(ending.end)
        self._connection = ProcessConnection(SocketChannel(ours), ending, LIMIT_S)
        opening = messages.Open(
            spec=spec.model_dump_json(),
            device=device,
            recipe="",
            initial=str(bundles_dir),
            data=str(data_dir),
            part="train",
        )
        try:
            opened, _ = self._connection.ask(opening, messages.Opened)
        except BaseException:
            self.close()
            raise
        self.device: str = opened.device
        self.memory = ProcessMemory(opened)

    def test(self) -> SelfTestResult:
        told, _ = self._connection.ask(messages.Test(), messages.Tested)
        return SelfTestResult(told.error, told.seconds, told.saved_bytes, told.trouble)

    def replica(self, spec: JobSpec) -> RecipeReplica:
        built, _ = self._connection.ask(messages.Build(spec=spec.model_dump_json()), messages.Built)
        about = self._connection, self._shared, self._layout
        return RecipeReplica(*about, lambda unit: len(spec.plan.micro_batches(unit)), built, self.memory.hear_peak)

    def close(self) -> None:
        """End the process."""
        self._closing.close()


class _Ending:
    """The end of a device's process, as `connection.Ending`."""

    def __init__(self, process: "subprocess.Popen[bytes]", device: str) -> None:
        self._process, self._device = process, device

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

    def error(self) -> RecipeError:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        self.end()
        return RecipeError(f"the process of device {self._device} ended with code {self._process.returncode}")
