"""A WebSocket by hand: the handshake on a bare socket, and frames, so that tests can send wrong ones."""

import socket
from urllib.parse import urlsplit

from computeshare.transport.forwarder import ADMITTED, CHALLENGE_BYTES, GatewayAccess


def handshake(access: GatewayAccess) -> bytes:
    """The request with which a client asks for a WebSocket."""
    return (
        f"GET {urlsplit(access.url).path} HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
        f"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n"
        f"Authorization: {access.authorization}\r\n\r\n"
    ).encode()


def dialled(access: GatewayAccess) -> socket.socket:
    """A bare connection to the gateway's port."""
    parts = urlsplit(access.url)
    return socket.create_connection((parts.hostname or "", parts.port or 0), timeout=10)


def upgraded(access: GatewayAccess) -> socket.socket:
    """A bare socket after the WebSocket's handshake and the proof of the machine's key."""
    raw = dialled(access)
    raw.sendall(handshake(access))
    with raw.makefile("rb") as answer:
        assert answer.readline().startswith(b"HTTP/1.1 101")
        while answer.readline() != b"\r\n":
            pass
        assert answer.read(2) == bytes([0x82, CHALLENGE_BYTES])
        raw.sendall(frame(access.proof(access.key.current(), answer.read(CHALLENGE_BYTES))))
        assert answer.read(2 + len(ADMITTED))[2:] == ADMITTED.encode()
    return raw


def frame(data: bytes, opcode: int = 2, final: bool = True) -> bytes:
    """A masked frame, with a mask of zeros."""
    return head(len(data), opcode, final) + data


def head(size: int, opcode: int = 2, final: bool = True) -> bytes:
    """The beginning of a masked frame of `size` bytes, up to its data."""
    if size < 126:
        length = bytes([0x80 | size])
    else:
        length = b"\xfe" + size.to_bytes(2, "big") if size < 1 << 16 else b"\xff" + size.to_bytes(8, "big")
    return bytes([0x80 * final | opcode]) + length + bytes(4)
