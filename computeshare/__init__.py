"""ComputeShare: train a PyTorch model on the machines you already own."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from computeshare.client import ComputeShare

__version__ = "0.1.0"
__all__ = ["ComputeShare", "__version__"]


def __getattr__(name: str) -> object:
    """`ComputeShare`, found when it is asked for: the processes that need no client do without what it imports."""
    if name != "ComputeShare":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from computeshare.client import ComputeShare

    return ComputeShare
