"""What the fork server imports before it forks reducers and evaluators: everything that takes seconds, once."""

import atexit
import os
import shutil
import threading

from computeshare.runtime.processes import PARENT, SOCKETS


def end() -> None:
    """End at once, without taking torch apart for seconds, and tidy up for a `computeshare up` that was killed."""
    if folder := os.environ.get(SOCKETS):
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def load() -> None:
    """Import it all. The server looks after its parent only once this is done, so that a thread does so meanwhile."""
    parent, loaded = os.getppid(), threading.Event()

    def watch() -> None:
        while not loaded.wait(0.1):
            if os.getppid() != parent:
                end()

    watcher = threading.Thread(target=watch, name="parent-watch", daemon=True)
    watcher.start()
    import computeshare.evaluator.process
    import computeshare.tasks.datasets
    import computeshare.tasks.metrics  # noqa: F401
    from computeshare.reducer import process

    process.warm()
    loaded.set()
    watcher.join()  # nothing is forked beside a thread


atexit.register(end)  # runs in the fork server alone: what it forks ends without
load()
os.environ[PARENT] = str(os.getpid())  # for the server's children: it may be dead before they can ask who forked them
