"""Thin links on one machine: network namespaces, each behind a link of its own with a rate and a delay.

    python -m bench.links --rate 20 --rtt 20        # compares these values with a plain TCP transfer

All links end in a bridge that has an address of this machine. A worker reaches the control plane through one link, and
a rank of DistributedDataParallel reaches another rank through two: the sender's link limits the rate, and so does the
receiver's. `rtt_ms` is the round trip to this machine or, with `between`, from namespace to namespace. Needs Linux and
root. (A rate counts Ethernet frames: TCP gets 95.6 % of it.)
"""

import argparse
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

BURST = "4kb"
"""Burst of the token bucket: less than any message of interest, more than a frame."""
QUEUE = "100ms"
"""Queue in front of a link before frames are dropped, as time at the link's rate."""
_OWN = re.compile(r"\bcs(\d+)[bion]\d+\b")


class NoLinks(Exception):
    """Thin links cannot be made here."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A link's properties, the same in both directions: rate in Mbit/s (0: unlimited), added round trip in ms."""

    rate_mbit: float = 0.0
    rtt_ms: float = 0.0
    between: bool = False
    """Whether the round trip is from namespace to namespace, so that each link adds half of it."""


@dataclass(frozen=True, slots=True)
class Moved:
    """Bytes of frames over links since they were made, by the kernel's counters."""

    up: int
    down: int


@dataclass(frozen=True, slots=True)
class Link:
    """One namespace: `inner` and `outer` are its and the bridge's end of its link, `address` is its address."""

    namespace: str
    outer: str
    inner: str
    address: str

    def inside(self, command: Sequence[str]) -> list[str]:
        """The command line that runs a command in the namespace; the process id stays the same."""
        return ["ip", "netns", "exec", self.namespace, *command]

    def moved(self) -> Moved:
        """Bytes up from the namespace and down to it so far."""
        counted = Path("/sys/class/net", self.outer, "statistics")
        return Moved(*(int((counted / f"{way}_bytes").read_text()) for way in ("rx", "tx")))


@dataclass(frozen=True, slots=True)
class Links:
    """Some links, and this machine's address for the namespaces behind them."""

    host: str
    each: tuple[Link, ...]
    interface = "net0"
    """The name of the link's end in every namespace."""

    def moved(self) -> Moved:
        """The sum over all links."""
        found = [link.moved() for link in self.each]
        return Moved(sum(one.up for one in found), sum(one.down for one in found))


def missing() -> str | None:
    """Why thin links cannot be made here; None if they can."""
    if sys.platform != "linux":
        return "thin links need Linux's network namespaces"
    if os.geteuid() != 0:
        return "thin links need root (network namespaces and tc)"
    if lacking := [tool for tool in ("ip", "tc") if not shutil.which(tool)]:
        return f"thin links need the commands ip and tc (package iproute2); missing: {', '.join(lacking)}"
    return None


@contextmanager
def links(count: int, shape: Shape, number: int = 0) -> Iterator[Links]:
    """Up to nine namespaces behind links of this shape, until the end of the block.

    Removes leftovers of dead processes first.

    Args:
        number: 0 or 1: a process may have two sets of links at once.
    Raises: NoLinks.
    """
    if why := missing():
        raise NoLinks(why)
    remove_stale()
    pid = os.getpid()
    network = f"10.{64 + (pid >> 7) % 128}.{(2 * pid + number) % 256}"
    bridge = f"cs{pid}b{number}0"
    made = tuple(_named(f"{number}{i}", pid, f"{network}.{i + 1}") for i in range(1, count + 1))
    mine = {bridge, *(name for link in made for name in (link.namespace, link.outer, link.inner))}
    try:
        with _cables(made, shape.rtt_ms / (4 if shape.between else 2)):
            _bridge(bridge, f"{network}.1/24")
            for link in made:
                _connect(link, bridge, shape.rate_mbit)
            yield Links(f"{network}.1", made)
    finally:
        _remove({name: pid for name in _names() if name in mine})


def _named(number: str, pid: int, address: str) -> Link:
    return Link(f"cs{pid}n{number}", f"cs{pid}o{number}", f"cs{pid}i{number}", address)


@contextmanager
def _cables(made: Sequence[Link], delay_ms: float) -> Iterator[None]:
    """Make both ends of each link, outside of its namespace: a veth pair, or TAP devices with a delay between them."""
    if not delay_ms:
        for link in made:
            _run("ip", "link", "add", link.outer, "type", "veth", "peer", "name", link.inner)
        yield
        return
    command = [sys.executable, "-m", "bench.delay", str(delay_ms), *(f"{link.outer}:{link.inner}" for link in made)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout
    try:
        if process.stdout.readline() != "ready\n":
            raise NoLinks("the delay line did not start: is there a /dev/net/tun?")
        yield
    finally:
        process.stdin.close()
        process.wait(10)
        process.stdout.close()


def _bridge(name: str, address: str) -> None:
    _run("ip", "link", "add", name, "type", "bridge")
    _run("ip", "addr", "add", address, "dev", name)
    _run("ip", "link", "set", name, "up")


def _connect(link: Link, bridge: str, rate_mbit: float) -> None:
    """Put a link's inner end into its namespace and its outer end on the bridge; limit the outgoing rate of each."""
    inside = ("-n", link.namespace)
    _run("ip", "netns", "add", link.namespace)
    # No segmentation offload, so that the kernel counts real frames.
    _run("ip", "link", "set", link.inner, "netns", link.namespace, "name", Links.interface, "gso_max_segs", "1")
    _run("ip", *inside, "addr", "add", f"{link.address}/24", "dev", Links.interface)
    _run("ip", *inside, "link", "set", Links.interface, "up")
    _run("ip", *inside, "link", "set", "lo", "up")
    _run("ip", "link", "set", link.outer, "master", bridge, "up", "gso_max_segs", "1")
    _run("ip", "link", "set", bridge, "gso_max_segs", "1")
    if rate_mbit:
        shaped = ("root", "tbf", "rate", f"{round(1000 * rate_mbit)}kbit", "burst", BURST, "latency", QUEUE)
        _run("tc", "qdisc", "add", "dev", link.outer, *shaped)
        _run("tc", *inside, "qdisc", "add", "dev", Links.interface, *shaped)


def remove_stale() -> None:
    """Remove the devices and namespaces of dead processes, and the processes still running in these namespaces."""
    _remove({name: pid for name, pid in _names().items() if not psutil.pid_exists(pid)})


def _names() -> dict[str, int]:
    """The namespaces and devices made by this module, each with the id of the process that made it."""
    text = _run("ip", "netns", "list") + _run("ip", "-o", "link", "show")
    return {match[0]: int(match[1]) for match in _OWN.finditer(text)}


def _remove(names: dict[str, int]) -> None:
    for name, pid in names.items():
        if name.startswith(f"cs{pid}n"):
            for left in _run("ip", "netns", "pids", name).split():
                with contextlib.suppress(psutil.Error):
                    psutil.Process(int(left)).kill()
            _run("ip", "netns", "del", name)
    for name in _names():
        if name in names:
            with contextlib.suppress(NoLinks):  # removed with its other end
                _run("ip", "link", "del", name)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NoLinks(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def main() -> None:
    from bench.transfer import measure

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rate", type=float, default=20, help="Mbit/s")
    parser.add_argument("--rtt", type=float, default=0, help="milliseconds")
    options = parser.parse_args()
    for between in (False, True):
        with links(2, Shape(options.rate, options.rtt, between)) as made:
            found = measure(made.each[1], made.each[0] if between else None, made.host)
        path = "namespace to namespace" if between else "namespace to control plane"
        print(json.dumps({"path": path, "asked_mbit": options.rate, "asked_rtt_ms": options.rtt, **found}))


if __name__ == "__main__":
    try:
        main()
    except NoLinks as why:
        sys.exit(f"skipped: {why}")
