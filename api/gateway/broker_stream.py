"""A connection to the broker as a stream of bytes, opened and authenticated for somebody else."""

import asyncio
from dataclasses import dataclass
from typing import Any

from redis.asyncio import ConnectionPool
from redis.exceptions import RedisError

from computeshare.errors import SettingsError, Unreachable

CONNECT_S = 5.0
PIECE_BYTES = 1 << 18
"""The most bytes that are read at once, and so the size of the largest message."""


@dataclass(slots=True)
class BrokerStream:
    """An open connection. The object of redis-py is kept, since it closes the connection when it is deleted."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    _connection: Any

    @classmethod
    async def open(cls, url: str) -> "BrokerStream":
        """Connect, log in and select the address's database; the stream then speaks RESP2, until `HELLO`.

        Raises: Unreachable: the broker does not answer, or refuses the login. SettingsError: `url` is malformed.
        """
        try:
            pool: Any = ConnectionPool.from_url(
                url, protocol=2, socket_connect_timeout=CONNECT_S, socket_timeout=CONNECT_S
            )
            connection = pool.make_connection()
        except ValueError as error:
            raise SettingsError("the broker's address is malformed: correct COMPUTESHARE_REDIS_URL") from error
        try:
            await connection.connect()
        except (RedisError, OSError) as error:
            raise Unreachable(f"the broker does not answer: {type(error).__name__}") from error
        connection._reader._limit = PIECE_BYTES  # else 64 kB, which takes four times as many messages
        return cls(connection._reader, connection._writer, connection)

    def abort(self) -> None:
        """Close the connection without sending what is still to be sent."""
        self.writer.transport.abort()
