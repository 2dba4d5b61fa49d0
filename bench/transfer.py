"""Measures a link by a plain TCP transfer in each direction: `python -m bench.transfer serve|ADDRESS:PORT`."""

import json
import socket
import statistics
import subprocess
import sys
import time

from bench.links import Link

BYTES = 1 << 20
PINGS = 20


def measure(client: Link, server: Link | None, host: str) -> dict[str, float]:
    """Measure between a client in one namespace and a server in another namespace, or on this machine.

    Returns: `up_mbit` and `down_mbit` (payload, Mbit/s), `rtt_ms` (median on the idle link).
    """
    own = [sys.executable, "-m", "bench.transfer"]
    listen = [*own, "serve", server.address if server else host]
    process = subprocess.Popen(server.inside(listen) if server else listen, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        address = process.stdout.readline().strip()
        done = subprocess.run(client.inside([*own, address]), stdout=subprocess.PIPE, timeout=120, check=True)
        return dict(json.loads(done.stdout))
    finally:
        process.kill()
        process.wait()
        if process.stdout:
            process.stdout.close()


def serve(host: str) -> None:
    """Serve one client: answer its pings, receive its data, then send as much back."""
    with socket.create_server((host, 0)) as listener:
        print(f"{host}:{listener.getsockname()[1]}", flush=True)
        link, _ = listener.accept()
    with link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(PINGS):
            link.sendall(link.recv(1))
        seconds = _receive(link)
        link.sendall(json.dumps(seconds).ljust(64).encode())
        link.sendall(bytes(BYTES))
        link.recv(1)


def connect(address: str) -> dict[str, float]:
    """The client's side of `serve`."""
    host, port = address.split(":")
    with socket.create_connection((host, int(port)), 30) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pings = [_ping(link) for _ in range(PINGS)]
        link.sendall(bytes(BYTES))
        up_s = json.loads(link.recv(64, socket.MSG_WAITALL))
        down_s = _receive(link)
        link.sendall(b"x")
    rates = {name: round(8e-6 * BYTES / seconds, 2) for name, seconds in (("up_mbit", up_s), ("down_mbit", down_s))}
    return {**rates, "rtt_ms": round(1000 * statistics.median(pings), 2)}


def _ping(link: socket.socket) -> float:
    started = time.perf_counter()
    link.sendall(b"x")
    link.recv(1)
    return time.perf_counter() - started


def _receive(link: socket.socket) -> float:
    """Seconds from the first byte to the last."""
    left = BYTES - len(link.recv(1))
    started = time.perf_counter()
    while left:
        left -= len(link.recv(min(left, 1 << 16)))
    return time.perf_counter() - started


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(sys.argv[2])
    else:
        print(json.dumps(connect(sys.argv[1])))
