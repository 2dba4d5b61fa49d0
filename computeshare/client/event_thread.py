"""Reading a job's events in a background thread."""

import asyncio
import contextlib
import queue
import threading
from typing import Literal, Self

from computeshare.client.api.calls import Client
from computeshare.client.api.models import Event, Job
from computeshare.client.async_events import stream


class Follower:
    """Reads a job's events in a background thread, so that a caller can wait for the next event with a time limit.

    Use as a context manager: leaving it closes the connection, even an idle one.
    """

    def __init__(self, client: Client, job: Job) -> None:
        self._client, self._job = client, job
        self._found: queue.Queue[Event | Exception | Literal["end"]] = queue.Queue()

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._reading = self._loop.create_task(self._read())
        threading.Thread(target=self._run, name="events", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the thread has ended, and its loop is closed
            self._loop.call_soon_threadsafe(self._reading.cancel)

    def next(self, timeout_s: float) -> Event | Literal["end"] | None:
        """The next event, `end` after the last event, or None after `timeout_s`. Raises the reading thread's error."""
        try:
            found = self._found.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if isinstance(found, Exception):
            raise found
        return found

    def _run(self) -> None:
        with contextlib.closing(self._loop), contextlib.suppress(asyncio.CancelledError):
            self._loop.run_until_complete(self._reading)

    async def _read(self) -> None:
        try:
            async with contextlib.aclosing(stream(self._client, self._job)) as events:
                async for event in events:
                    self._found.put(event)
            self._found.put("end")
        except Exception as error:  # the waiting thread raises it
            self._found.put(error)
