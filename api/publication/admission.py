"""Decides whether the broker's memory has room for a job. Pure, except for `BrokerMemory.of`."""

from dataclasses import dataclass
from typing import Any

from redis import Redis

from api.text_format import size

BASE_BYTES = 8_000_000
"""Bytes that the server itself, seats and registrations take."""

FULL = 0.98
"""From this fraction of the limit on, blobs are refused: a new blob needs room beside the stored data."""


@dataclass(frozen=True, slots=True)
class BrokerMemory:
    """The broker's memory; `limit_bytes` is 0 where it has no limit of its own."""

    used_bytes: int
    limit_bytes: int

    @classmethod
    def of(cls, redis: Redis) -> "BrokerMemory":
        info: Any = redis.info("memory")
        return cls(int(info["used_memory"]), int(info.get("maxmemory") or 0))


def no_room(needed_bytes: int, promised_bytes: int, memory: BrokerMemory) -> str | None:
    """Why a job cannot start yet, and what would help; None if the job can start.

    Args:
        promised_bytes: the most that all admitted jobs may need together; they may use less now.
    """
    if not memory.limit_bytes:
        return None
    taken = max(memory.used_bytes, BASE_BYTES + promised_bytes)
    free = max(0, memory.limit_bytes - taken)
    if needed_bytes <= free:
        return None
    needs = f"Needs up to {size(needed_bytes)} of the broker's memory"
    if not may_fit(needed_bytes, memory):
        return (
            f"{needs}, whose limit is {size(memory.limit_bytes)}: raise the broker's maxmemory, or choose a smaller job"
        )
    return (
        f"{needs}, but {size(free)} of {size(memory.limit_bytes)} are free: wait for other jobs, or raise its maxmemory"
    )


def may_fit(needed_bytes: int, memory: BrokerMemory) -> bool:
    """Whether a job would fit if it were the only job."""
    return not memory.limit_bytes or needed_bytes <= memory.limit_bytes - BASE_BYTES


def exhausted(memory: BrokerMemory) -> str | None:
    """Why running jobs cannot go on at present; None if they can."""
    if memory.used_bytes < FULL * memory.limit_bytes or not memory.limit_bytes:
        return None
    full = f"The broker is out of memory ({size(memory.used_bytes)} of {size(memory.limit_bytes)} used)"
    return f"{full}: the job resumes once memory is free; end other jobs, or raise the broker's maxmemory"
