"""Train LeNet-5 on MNIST with whatever machines serve the queue, then score its weights on this one.

computeshare up --workers 2 --queue mnist      # in another terminal, or on another machine
python examples/train_mnist.py
"""

import argparse

import numpy as np
import torch

from computeshare import ComputeShare
from computeshare.client import Job
from computeshare.jobspec.catalog import catalog
from computeshare.settings import Settings
from computeshare.tasks.images.datasets.splits import open_split, prepare


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a model, then score its weights here.")
    parser.add_argument("--dataset", default="mnist")
    parser.add_argument("--model", default="lenet5")
    parser.add_argument("--queue", default="mnist")
    parser.add_argument("--epochs", type=int, default=2)
    given = parser.parse_args()

    with ComputeShare() as cs:
        job = cs.jobs.create(
            dataset=given.dataset,
            model=given.model,
            queue=given.queue,
            epochs=given.epochs,
            optimizer={"name": "SGD", "lr": 0.02, "momentum": 0.9},
        )
        print(f"job {job.id}: {job.url}")
        follow(job)
        print(f"the job says {job.accuracy:.2%}, scored here {score(job):.2%}")


def follow(job: Job) -> None:
    """Print what happens until the job has ended. Raises JobFailed where it did not complete."""
    for event in job.events():
        if event.type == "job":
            reason = f"  {job.reason}" if job.reason else ""
            print(f"{job.status}  {job.version}/{job.rounds_total}  {job.samples_per_s:,.0f} samples/s{reason}")
        elif event.type != "version":
            print(f"  {event.type} {event.data.get('data', {}).get('name', '')}")
    job.wait()


def score(job: Job) -> float:
    """The accuracy of the job's last weights on the test set, computed on this machine."""
    name, data_dir = job.spec["dataset"], Settings().data_dir
    prepare(name, data_dir)  # downloads what is missing
    test = open_split(name, "test", data_dir, catalog().datasets[name].shape)
    module = job.module("latest")
    correct = 0
    with torch.inference_mode():
        for start in range(0, len(test), 256):
            images, labels = test.batch(np.arange(start, min(start + 256, len(test))))
            correct += int((module(images).argmax(dim=1) == labels).sum())
    return correct / len(test)


if __name__ == "__main__":
    main()
