"""The parts of `computeshare doctor --selftest` that compute: `python -m computeshare.doctor.trial gradients|memory`.

Prints a line of JSON for each finding, as soon as it is known. COMPUTESHARE_DEVICE may name the device.
"""

import json
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

from computeshare.runtime.processes import exit_with_parent, spare_the_collector
from computeshare.settings import Settings

MODELS: dict[str, tuple[int, int, int]] = {
    "mlp": (1, 8, 8),
    "lenet5": (1, 28, 28),
    "simplenet": (1, 28, 28),
    "resnet18": (3, 32, 32),
    "mobilenet_v3_small": (3, 32, 32),
}
"""Dense layers; convolutions; dropout; BatchNorm and shortcuts; depthwise convolutions and squeeze-and-excitation. A
small `gpt` follows them: embeddings and attention."""
UNITS = 2000
SETTLED = 200
"""Units after which all lasting memory is allocated."""
SAMPLES = 32
LONGEST_S = 90.0


def gradients() -> Iterator[dict[str, Any]]:
    """Compare the device's gradients with the CPU's, three times for each model."""
    import torch

    from computeshare.jobspec.tasks.language_models import GptArgs
    from computeshare.tasks.images.classification import ImageClassification
    from computeshare.tasks.text.language_model import LanguageModel
    from computeshare.training import devices, selftest

    torch.set_num_threads(1)
    device = devices.choose(Settings().device)
    devices.make_deterministic(device)
    yield {"device": devices.describe(device)}
    classifiers = [ImageClassification("digits", name, shape) for name, shape in MODELS.items()]
    for task in (*classifiers, LanguageModel("tinyshakespeare", GptArgs(n_layer=2))):
        trial = selftest.run(task.on_noise(selftest.SAMPLES), device)
        yield {"model": task.name, "error": trial.error, "seconds": trial.seconds, "trouble": trial.trouble}


def memory() -> Iterator[dict[str, Any]]:
    """Bytes that a seat uses while it computes units: once settled, at the end, and at the peak."""
    import torch

    from computeshare.jobspec.sampling_plan import Plan
    from computeshare.tasks.images.classification import ImageClassification
    from computeshare.training import devices
    from computeshare.training.memory import peak_bytes, used_bytes
    from computeshare.training.replica import Replica

    torch.set_num_threads(1)  # several threads would wait for one another on a busy machine
    device = devices.choose(Settings().device)
    devices.make_deterministic(device)
    samples = SAMPLES * 50
    instance = ImageClassification("digits", "lenet5", MODELS["lenet5"]).on_noise(samples)
    replica = Replica(instance, Plan(0, samples, SAMPLES, 1), device)
    spare_the_collector()
    started, seen = time.monotonic(), []
    for unit in range(UNITS):
        replica.compute(unit)
        if unit >= SETTLED and unit % 20 == 0:
            seen.append(used_bytes(device))
        if time.monotonic() - started > LONGEST_S:
            break
    settled, end = (statistics.median(part) for part in (seen[:5], seen[-5:])) if len(seen) >= 10 else (0, 0)
    found = {"units": unit + 1, "seconds": time.monotonic() - started, "settled": settled, "end": end}
    yield found | {"peak": peak_bytes(device)}


if __name__ == "__main__":
    exit_with_parent()
    for one in {"gradients": gradients, "memory": memory}[sys.argv[1]]():
        print(json.dumps(one), flush=True)
