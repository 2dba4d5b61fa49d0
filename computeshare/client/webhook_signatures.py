"""Notifications as they travel: their names, their signature, and how a receiver checks it.

Signed as Standard Webhooks 1.0 says (standardwebhooks.com), so that any library for it verifies them, too. Needs
nothing but the standard library.
"""

import base64
import binascii
import hashlib
import hmac
import json
import re
import secrets
import time
from collections.abc import Mapping
from typing import Any, Literal

from computeshare.errors import InvalidSignature

EventName = Literal[
    "created",
    "paused",
    "held",
    "resumed",
    "retried",
    "completed",
    "failed",
    "cancelled",
    "checkpoint",
    "scored",
    "worker_joined",
    "worker_left",
    "worker_banned",
]
"""What a webhook can be told of; `held` is a pause that no user asked for."""
TOLERANCE_S = 300.0
_PREFIX = "whsec_"
_SHORTEST, _LONGEST = 24, 64
_SECONDS = re.compile(r"[0-9]{1,12}")


def new_secret() -> str:
    """A secret that nobody can guess."""
    return _PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def key_of(secret: str) -> bytes:
    """The bytes to sign with. Raises InvalidSignature if `secret` is none."""
    try:
        key = base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not secret.startswith(_PREFIX) or not _SHORTEST <= len(key) <= _LONGEST:
        wanted = f"{_PREFIX} and then {_SHORTEST} to {_LONGEST} random bytes in base64"
        raise InvalidSignature(f"this is no secret of a webhook: it must be {wanted}")
    return key


def sign(message_id: str, timestamp_s: int, body: bytes, secret: str) -> str:
    """The value of the header `webhook-signature`.

    Args:
        message_id: the notification's id; it holds no full stop.
        timestamp_s: when it is sent, in seconds since the epoch.
    Raises: InvalidSignature: `secret` is none.
    """
    signed = b"%s.%d.%s" % (message_id.encode(), timestamp_s, body)
    return "v1," + base64.b64encode(hmac.new(key_of(secret), signed, hashlib.sha256).digest()).decode()


def verify(
    headers: Mapping[str, str],
    body: bytes | str,
    secret: str,
    tolerance_s: float = TOLERANCE_S,
    now_s: float | None = None,
) -> dict[str, Any]:
    """A notification's content, if it is one: signed with this secret, lately, and not changed since.

    Args:
        headers: those of the request, in any case.
        body: the request's body exactly as it was received, not parsed and written again.
        secret: the one that was shown when the webhook was created.
        tolerance_s: how many seconds sender's and receiver's clocks may be apart.
        now_s: the time to compare with, in seconds since the epoch; default now.
    Raises: InvalidSignature: it is none; the message says why.
    """
    message_id, sent, signatures = _headers(headers)
    timestamp_s = _timestamp(sent, tolerance_s, time.time() if now_s is None else now_s)
    raw = body.encode() if isinstance(body, str) else body
    expected = sign(message_id, timestamp_s, raw, secret).encode()
    matches = [hmac.compare_digest(expected, given.encode(errors="replace")) for given in signatures.split(" ")]
    if not any(matches):
        raise InvalidSignature("no signature matches: is this the webhook's secret, and the body exactly as it came?")
    try:
        content = json.loads(raw)
    except ValueError as error:
        raise InvalidSignature("the body is signed, but is no JSON") from error
    if not isinstance(content, dict):
        raise InvalidSignature("the body is signed, but is no JSON object")
    return content


def _headers(headers: Mapping[str, str]) -> tuple[str, str, str]:
    given = {name.lower(): value for name, value in headers.items()}
    for name in ("webhook-id", "webhook-timestamp", "webhook-signature"):
        if not given.get(name):
            raise InvalidSignature(f"the header {name} is missing: this is no notification of ComputeShare")
    return given["webhook-id"], given["webhook-timestamp"], given["webhook-signature"]


def _timestamp(text: str, tolerance_s: float, now_s: float) -> int:
    if not _SECONDS.fullmatch(text):
        raise InvalidSignature("the header webhook-timestamp is no number of seconds")
    age_s = now_s - int(text)
    if abs(age_s) > tolerance_s:
        when = f"{age_s:.0f} s ago" if age_s > 0 else f"{-age_s:.0f} s in the future"
        raise InvalidSignature(f"sent {when}, and {tolerance_s:.0f} s are borne: is this machine's clock right?")
    return int(text)
