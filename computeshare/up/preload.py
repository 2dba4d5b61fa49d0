"""Imported by the fork server before it forks reducers and evaluators, so that slow imports happen once."""

import atexit
import os
import shutil
import threading

from computeshare.runtime.processes import PARENT, SOCKETS


def end() -> None:
    """End at once, without the seconds of torch's teardown, and remove the sockets' folder if `up` was killed."""
    if folder := os.environ.get(SOCKETS):
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def load() -> None:
    """Import the slow modules. A thread watches the parent meanwhile: the server itself does so only afterwards."""
    parent, loaded = os.getppid(), threading.Event()

    def watch() -> None:
        while not loaded.wait(0.1):
            if os.getppid() != parent:
                end()

    watcher = threading.Thread(target=watch, name="parent-watch", daemon=True)
    watcher.start()
    import computeshare.evaluator.process
    import computeshare.tasks.metrics
    import computeshare.tasks.registry  # noqa: F401
    from computeshare.reducer import process

    process.warm()
    loaded.set()
    watcher.join()  # no fork while a thread runs


atexit.register(end)  # runs in the fork server alone: forked processes end without atexit
load()
os.environ[PARENT] = str(os.getpid())  # for the server's children: it may be dead before they can ask who forked them
