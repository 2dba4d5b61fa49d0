"""What the control plane asks of a worker beside handing it seats: to leave one, or to leave for good.

An order is said again every second while it stands and forgotten soon after, so that nothing is left of one that was
taken back, and a broker that lost everything has it again at once.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from redis import Redis

from computeshare.protocol import keys

ORDER_MS = 10_000
"""How long an order that is not said again is kept."""
LONGEST = 300


@dataclass(frozen=True, slots=True)
class Orders:
    """`leave` is the id of a seat to end politely, `dismissed` why the worker is to end; None: nothing is asked."""

    leave: str | None = None
    dismissed: str | None = None


def give_orders(redis: Redis, orders: Mapping[str, Orders]) -> None:
    """Say what is asked of each of these workers."""
    if not orders:
        return
    pipeline = redis.pipeline(transaction=False)
    for worker_id, order in orders.items():
        said = json.dumps({"leave": order.leave, "dismissed": order.dismissed})
        pipeline.set(keys.orders(worker_id), said, px=ORDER_MS)
    pipeline.execute()


def read_orders(redis: Redis, worker_id: str) -> Orders:
    """What is asked of a worker now; nothing where that cannot be read."""
    raw: Any = redis.get(keys.orders(worker_id))
    try:
        said = json.loads(raw or b"{}")
        leave, dismissed = said.get("leave"), said.get("dismissed")
    except (ValueError, AttributeError):
        return Orders()
    return Orders(str(leave)[:LONGEST] if leave else None, str(dismissed)[:LONGEST] if dismissed else None)
