"""Measures exchanges between 8, 16, 32 and 64 gossip peers: their rate, and the broker's CPU time for each.

    python -m bench.gossip_peers --seconds 10 --times 3

Peers without a model publish a vector in float16 and average it with another peer's, as fast as they can, each over
connections of its own to a real broker. They are threads of two processes. The numbers of peers take turns, so that
load on the machine affects all of them alike.
"""

import argparse
import multiprocessing
import secrets
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from operator import sub
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from bench.scaling import cpu_s
from bench.support.clean_exit import end_cleanly_when_asked
from bench.support.report import Cell, Part, Table, markdown
from computeshare.codecs.registry import CODECS
from computeshare.gossip.exchange import Partners, PeerExchange
from computeshare.gossip.peer_weights import GroupWeights, PublishedNotice
from computeshare.jobspec.spec import CodecSpec
from computeshare.strategies.registry import parse_strategy
from computeshare.transport.connections import connect
from computeshare.types import Message, Vector
from computeshare.up.embedded_broker import EmbeddedBroker

COUNTS = (8, 16, 32, 64)
PROCESSES = 2
CODEC = CODECS[CodecSpec().up]
COLUMNS = ("peers", "exchanges/s", "broker, CPU µs an exchange", "fewest of a peer", "most of a peer", "late or lost")


@dataclass(frozen=True, slots=True)
class Measured:
    """A measurement with one number of peers: the exchanges of each, and how many units had none."""

    seconds: float
    broker_cpu_s: float
    exchanges: Sequence[int]
    missed: int


def peer(url: str, group: str, name: str, size: int, stop: Any) -> tuple[int, int]:
    """Average a vector with other peers' until `stop`; returns how many exchanges there were, and how often none."""
    board = GroupWeights(connect(url), group, name)
    averaging = parse_strategy({"kind": "gossip"}).averaging
    assert averaging is not None

    def decode(_: PublishedNotice, message: Message) -> tuple[Vector, Vector]:
        assert message[0] is not None
        return CODEC.decode(message[0], size), np.zeros(0, np.float32)

    exchange = PeerExchange(averaging, board, Partners(name, 0, averaging.matching), 1, decode)
    own = np.random.default_rng(0).normal(0, 0.1, size).astype(np.float32)
    met = units = 0
    while not stop.is_set():
        board.publish("bench", units, 1.0, [CODEC.encode(own, units)])
        exchange.ask(units, always=True)
        units += 1
        if other := exchange.answer():
            own, _ = exchange.average(own, np.zeros(0, np.float32), other, units, 1.0)
            met += 1
    board.leave()
    return met, units - met


def peers(url: str, group: str, names: Sequence[str], size: int, begin: Any, stop: Any, found: Any) -> None:
    """In a process of its own: a thread for each of these peers."""
    results: list[tuple[int, int]] = []
    threads = [
        threading.Thread(target=lambda name=name: results.append(peer(url, group, name, size, stop))) for name in names
    ]
    CODEC.encode(np.zeros(size, np.float32), 0)  # imports torch
    begin.wait()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found.put(results)


def measure(url: str, count: int, size: int, seconds: float) -> Measured:
    """Measure one group of this many peers."""
    broker = psutil.Process(connect(url).info("server")["process_id"])
    context = multiprocessing.get_context("spawn")
    begin, stop, found = context.Barrier(PROCESSES + 1), context.Event(), context.Queue()
    names = [secrets.token_hex(6) for _ in range(count)]
    group = secrets.token_hex(4)
    shares = [names[number::PROCESSES] for number in range(PROCESSES)]
    running = [
        context.Process(target=peers, args=(url, group, share, size, begin, stop, found), daemon=True)
        for share in shares
    ]
    for process in running:
        process.start()
    begin.wait(60)
    before, began = cpu_s(broker), time.monotonic()
    time.sleep(seconds)
    took, (cpu,) = time.monotonic() - began, map(sub, cpu_s(broker), before)
    stop.set()
    results = [pair for _ in running for pair in found.get(timeout=60)]
    for process in running:
        process.join(30)
    return Measured(took, cpu, [met for met, _ in results], sum(missed for _, missed in results))


def tell(runs: dict[int, list[Measured]], size: int) -> Part:
    """A table with a row for each number of peers: medians."""
    rows: list[list[Cell]] = []
    for count, some in runs.items():
        rate = statistics.median(sum(run.exchanges) / run.seconds for run in some)
        cost = statistics.median(1e6 * run.broker_cpu_s / sum(run.exchanges) for run in some)
        every = [each for run in some for each in run.exchanges]
        rows.append([count, rate, cost, min(every), max(every), sum(run.missed for run in some)])
    costs, rates = [float(row[2] or 0) for row in rows], [float(row[1] or 0) for row in rows]
    note = (
        f"The broker's CPU for an exchange differs by {max(costs) / min(costs) - 1:.0%}, the rate by "
        f"{max(rates) / min(rates) - 1:.0%}."
    )
    return Part([Table(f"Gossip peers without a model, {size:,} values in float16", COLUMNS, rows, note)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--values", type=int, default=61_706, help="in a peer's vector; lenet5's by default")
    parser.add_argument("--seconds", type=float, default=10, help="for each number of peers, each time")
    parser.add_argument("--times", type=int, default=3)
    options = parser.parse_args()
    end_cleanly_when_asked()
    runs: dict[int, list[Measured]] = {count: [] for count in options.peers}
    with tempfile.TemporaryDirectory() as folder:
        broker = EmbeddedBroker.start(Path(folder) / "broker.log")
        try:
            for _ in range(options.times):
                for count in options.peers:
                    runs[count].append(measure(broker.url, count, options.values, options.seconds))
        finally:
            broker.stop()
    print(markdown(tell(runs, options.values)))


if __name__ == "__main__":
    main()
