"""Train a classifier on a folder of images with a folder for each class, then let it classify an image.

computeshare up --workers 1                    # in another terminal
python examples/image_folder.py birds ~/Pictures/birds photo.jpg
"""

import argparse
from pathlib import Path

from computeshare import ComputeShare


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on a folder of images, then classify an image.")
    parser.add_argument("name", help="what jobs call the images")
    parser.add_argument("folder", type=Path, help="a folder with a folder of images for each class")
    parser.add_argument("photo", type=Path, help="an image to classify")
    parser.add_argument("--size", type=int, default=32, help="pixels of each side, to which images are resized once")
    parser.add_argument("--model", default="resnet20")
    parser.add_argument("--epochs", type=int, default=10)
    given = parser.parse_args()

    with ComputeShare() as cs:
        added = cs.datasets.add(given.name, given.folder, size=(given.size, given.size))
        facts = added.dataset["facts"]
        print(f"{facts['train']:,} images to train on, {facts['test']:,} for the test", *added.remarks, sep="\n")
        job = cs.jobs.create(
            dataset=given.name,
            model=given.model,
            epochs=given.epochs,
            micro_batch=32,
            optimizer={"name": "SGD", "lr": 0.05, "momentum": 0.9},
            augment=["crop", "flip"],
        )
        print(f"training: {job.url}", flush=True)
        job.wait()
        print(f"{job.accuracy:.2%} of the test images are classified correctly")
        for guess in job.predict(given.photo, version="best")[0]:
            print(f"{guess.probability:6.1%}  {guess.name}")


if __name__ == "__main__":
    main()
