"""Orders of the control plane to a worker, beside its seats: leave a seat, or exit.

The control plane repeats an order every second, and the broker forgets it soon after the last repetition. So a
withdrawn order disappears by itself, and a broker that has lost its data soon has the order again.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redis import Redis

from computeshare.protocol import keys

ORDER_MS = 10_000
"""Milliseconds for which the broker keeps an order after its last repetition."""
LONGEST = 300


@dataclass(frozen=True, slots=True)
class Orders:
    """`leave`: id of a seat to end gracefully; `dismissed`: the reason why the worker is to exit; None: no order."""

    leave: str | None = None
    dismissed: str | None = None


def give_orders(redis: Redis, orders: Mapping[str, Orders]) -> None:
    """Write each worker's current orders."""
    if not orders:
        return
    pipeline = redis.pipeline(transaction=False)
    for worker_id, order in orders.items():
        said = json.dumps({"leave": order.leave, "dismissed": order.dismissed})
        pipeline.set(keys.orders(worker_id), said, px=ORDER_MS)
    pipeline.execute()


def read_orders(redis: Redis, worker_id: str) -> Orders:
    """A worker's current orders; none if they cannot be parsed."""
    raw: Any = redis.get(keys.orders(worker_id))
    try:
        said = json.loads(raw or b"{}")
        leave, dismissed = said.get("leave"), said.get("dismissed")
    except (ValueError, AttributeError):
        return Orders()
    return Orders(str(leave)[:LONGEST] if leave else None, str(dismissed)[:LONGEST] if dismissed else None)
