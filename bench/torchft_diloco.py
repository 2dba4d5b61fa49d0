"""DiLoCo as torchft does it, each rank a replica group of its own; for `peer_methods`, if torchft is installed."""

import importlib
import os
import socket
from collections.abc import Iterable
from datetime import timedelta
from importlib.util import find_spec
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

LONGEST = timedelta(hours=1)
"""The longest wait for the other ranks: a thin link takes minutes for the weights."""


def is_installed() -> bool:
    return find_spec("torchft") is not None


def begin(module: nn.Module, inner: torch.optim.Optimizer, every: int) -> Any:
    """Have the ranks' models averaged after each `every` steps of `inner`: by all-reduce over gloo, in float32.

    Rank 0 also runs torchft's lighthouse. The default process group must be there. What is returned has to be kept.
    """
    torchft, local_sgd, coordination = (
        importlib.import_module(name) for name in ("torchft", "torchft.local_sgd", "torchft.coordination")
    )
    own, rank, ranks = _own_address(), dist.get_rank(), dist.get_world_size()
    lighthouse = coordination.LighthouseServer("0.0.0.0:0", min_replicas=ranks) if rank == 0 else None
    told = [f"http://{own}:{lighthouse.address().rpartition(':')[2]}" if lighthouse else ""]
    dist.broadcast_object_list(told)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        own, 0, is_master=True, wait_for_workers=False
    )
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=LONGEST),
        load_state_dict=lambda state: None,
        state_dict=dict,
        min_replica_size=ranks,
        use_async_quorum=False,
        timeout=LONGEST,
        quorum_timeout=LONGEST,
        rank=0,
        world_size=1,
        store_addr=own,
        store_port=store.port,
        lighthouse_addr=told[0],
        replica_id=f"rank{rank}",
        hostname=own,
        init_sync=False,
    )
    outer = torch.optim.SGD(module.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    averaging = local_sgd.DiLoCo(manager, [module], inner, outer, every, pin_memory=False)
    averaging.__enter__()
    return averaging, manager, store, lighthouse


def _own_address() -> str:
    """The IPv4 address of the interface that gloo uses."""
    found: Iterable[Any] = psutil.net_if_addrs().get(os.environ.get("GLOO_SOCKET_IFNAME", ""), ())
    return next((str(one.address) for one in found if one.family == socket.AF_INET), "127.0.0.1")
