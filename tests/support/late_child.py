"""A child of the fork server that comes to look at its parent only once that has been killed.

    python -m tests.support.late_child

Prints how the child ended.
"""

import multiprocessing
import os
import signal
import time
from multiprocessing.connection import Connection

import psutil

from computeshare.runtime.processes import exit_with_parent

LIFE_S = 20


def late(pipe: Connection) -> None:
    pipe.send(os.getpid())
    pipe.recv()
    exit_with_parent()
    time.sleep(LIFE_S)


def main() -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["computeshare.up.preload"])
    here, there = context.Pipe()
    context.Process(target=late, args=(there,)).start()
    child = psutil.Process(here.recv())
    server = child.parent()
    assert server is not None and server.pid != os.getpid()
    os.kill(server.pid, signal.SIGKILL)
    while child.ppid() == server.pid:
        time.sleep(0.01)
    here.send("go")
    gone, _ = psutil.wait_procs([child], timeout=LIFE_S / 2)
    print("ended with its parent" if gone else "an orphan", flush=True)
    os._exit(0)  # multiprocessing would wait for the child


if __name__ == "__main__":
    main()
