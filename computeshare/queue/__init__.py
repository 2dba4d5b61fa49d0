"""Seats over RQ: which workers there are, and handing each a seat on a queue of its own.

Every work-around for RQ lives in this package.
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
