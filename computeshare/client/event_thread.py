"""Reading a job's events beside whatever else a program does."""

import asyncio
import contextlib
import queue
import threading
from typing import Literal, Self

from computeshare.client.api.calls import Client
from computeshare.client.api.models import Event, Job
from computeshare.client.async_events import stream


class Follower:
    """Reads events in a thread of its own, so that whoever waits for one may give up or look elsewhere meanwhile.

    Usable as a context manager; its end cuts the connection, whether or not anything comes over it.
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
        with contextlib.suppress(RuntimeError):  # it has come to its end
            self._loop.call_soon_threadsafe(self._reading.cancel)

    def next(self, timeout_s: float) -> Event | Literal["end"] | None:
        """The next event, `end` after the last one, None if there was none in time. Raises what following raises."""
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
