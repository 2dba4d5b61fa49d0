"""`python -m computeshare.training.device_group.server SOCKET MEMORY`: the process of a worker's further device."""

import sys
from pathlib import Path

from computeshare.bundles.store import BundleStore
from computeshare.errors import ComputeShareError, RecipeError
from computeshare.jobspec.spec import JobSpec
from computeshare.tasks.registry import task_of
from computeshare.training import devices
from computeshare.training.computation import choose_device
from computeshare.training.recipe_process import messages
from computeshare.training.recipe_process.channel import SocketChannel
from computeshare.training.recipe_process.server import Answer, Server, connected
from computeshare.training.recipe_process.shared_vectors import SharedVectors


def main() -> None:
    """Serve requests until the seat is gone."""
    with connected(int(sys.argv[1])) as channel:
        server: Server | None = None
        while True:
            head, body = channel.receive(messages.MOST_REQUEST, sys.maxsize)
            request = messages.request_in(head)
            try:
                if isinstance(request, messages.Open):
                    server = _started(request, int(sys.argv[2]), channel)
                    answer: Answer = _opened(server), ()
                else:
                    assert server
                    answer = server.answer(request, body)
            except ComputeShareError as error:
                answer = messages.Failed.of(error), ()
            except Exception as error:  # out of memory, or the driver's: the seat goes on without this device
                answer = messages.Failed.of(RecipeError(f"{type(error).__name__}: {error}")), ()
            channel.send(answer[0].dumps(), answer[1])


def _started(opening: messages.Open, memory: int, channel: SocketChannel) -> Server:
    spec, data_dir = JobSpec.model_validate_json(opening.spec), Path(opening.data or "")
    device, task = choose_device(spec, opening.device), task_of(spec, BundleStore(Path(opening.initial)))
    instance = task.instance(spec.seed, "train", data_dir)
    shared = SharedVectors(memory, instance.layout)
    return Server(spec, task, device, shared, channel, {"train": instance})


def _opened(server: Server) -> messages.Opened:
    device = server.device
    described = {"device": devices.describe(device)[:200], "device_type": device.type, "kind": devices.kind(device)}
    return messages.Opened.model_validate(described | {"memory": server.memory()})


if __name__ == "__main__":
    main()
