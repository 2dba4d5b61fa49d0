"""Seats over RQ: the list of live workers, and an RQ queue of its own for each worker to receive seats.

All workarounds for RQ are in this package.
"""

from computeshare.queue.orders import Orders, give_orders, read_orders
from computeshare.queue.roster import WorkerInfo, list_workers, register, unregister
from computeshare.queue.seats import Seat, SeatQueue

__all__ = [
    "Orders",
    "Seat",
    "SeatQueue",
    "WorkerInfo",
    "give_orders",
    "list_workers",
    "read_orders",
    "register",
    "unregister",
]
