"""A reverse proxy that speaks HTTP/1.1 only, buffers what it forwards, and cuts idle connections."""

import asyncio
import contextlib
import threading
from typing import Self

BUFFER_BYTES = 65_536
HEAD_BYTES = 65_536


class ReverseProxy:
    """Forwards a loopback port to a server on another; `cut_all` is a restart that ends every connection.

    Args:
        target: host and port of the server.
        idle_s: connections on which nothing has moved for so long, either way, are cut.
        hold_s: how long bytes may be held back to fill the buffer.
    """

    def __init__(self, target: tuple[str, int], idle_s: float = 30.0, hold_s: float = 0.005) -> None:
        self._target, self._idle_s, self._hold_s = target, idle_s, hold_s
        self._loop = asyncio.new_event_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="reverse proxy", daemon=True)
        self.port = 0
        self.upgrades = self.idle_cuts = 0
        """Connections that were upgraded, and that were cut for being idle."""

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    def cut_all(self) -> None:
        """End every connection at once."""
        self._loop.call_soon_threadsafe(lambda: [each.cancel() for each in self._tasks])

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_server(self._accept, "127.0.0.1", self.port, limit=HEAD_BYTES)
        )
        self.port = server.sockets[0].getsockname()[1]
        self._started.set()
        self._loop.run_forever()
        server.close()
        for each in self._tasks:
            each.cancel()
        self._loop.run_until_complete(asyncio.gather(*self._tasks, return_exceptions=True))
        self._loop.close()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        there: asyncio.StreamWriter | None = None
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            back, there = await asyncio.open_connection(*self._target)
            there.write(self._passed_on(head))
            await self._carry((reader, there), (back, writer))
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError, asyncio.CancelledError):
            pass
        finally:
            for each in (writer, there):
                if each:
                    each.transport.abort()
            self._tasks.discard(task)

    def _passed_on(self, head: bytes) -> bytes:
        """The request's head: HTTP/1.1, one request per connection unless it is upgraded, and who asked."""
        line, *headers = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
        assert line.endswith(b" HTTP/1.1")
        upgrade = any(header.lower().replace(b" ", b"") == b"upgrade:websocket" for header in headers)
        self.upgrades += upgrade
        kept = [each for each in headers if not each.lower().startswith(b"connection:")]
        kept += [b"Connection: " + (b"Upgrade" if upgrade else b"close"), b"X-Forwarded-For: 203.0.113.7"]
        return b"\r\n".join([line, *kept]) + b"\r\n\r\n"

    async def _carry(self, *ways: tuple[asyncio.StreamReader, asyncio.StreamWriter]) -> None:
        moved = asyncio.Event()
        tasks = [asyncio.ensure_future(self._one_way(reader, writer, moved)) for reader, writer in ways]
        try:
            while not any(each.done() for each in tasks):
                moved.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._idle_s):
                        await moved.wait()
                if not moved.is_set():
                    self.idle_cuts += 1
                    return
        finally:
            for each in tasks:
                each.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _one_way(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, moved: asyncio.Event) -> None:
        try:
            while data := await reader.read(BUFFER_BYTES):
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._hold_s):
                        while len(data) < BUFFER_BYTES and (more := await reader.read(BUFFER_BYTES - len(data))):
                            data += more
                writer.write(data)
                await writer.drain()
                moved.set()
        finally:
            moved.set()
