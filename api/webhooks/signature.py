"""Signs notifications by Standard Webhooks 1.0 (standardwebhooks.com), so that its libraries verify them."""

import base64
import binascii
import secrets
from datetime import UTC, datetime

from standardwebhooks import Webhook as Signer

PREFIX = "whsec_"
FEWEST_BYTES, MOST_BYTES = 24, 64
"""The standard's limits on a secret's length; the library checks only that it is not empty."""


def new_secret() -> str:
    """A random secret: `whsec_` and 32 bytes in base64."""
    return PREFIX + base64.b64encode(secrets.token_bytes(32)).decode()


def require_secret(text: str) -> str:
    """Return the secret unchanged. Raises ValueError if it is not of the standard's form."""
    try:
        key = base64.b64decode(text.removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        key = b""
    if not text.startswith(PREFIX) or not FEWEST_BYTES <= len(key) <= MOST_BYTES:
        wanted = f"{PREFIX}, then {FEWEST_BYTES} to {MOST_BYTES} random bytes in base64"
        raise ValueError(f"not a webhook secret: must be {wanted}")
    return text


def signed(message_id: str, timestamp_s: int, body: str, secret: str) -> dict[str, str]:
    """The headers that identify and sign a notification.

    Args:
        message_id: the notification's id; it must not contain a full stop.
        timestamp_s: the time of sending, in seconds since the epoch.
    """
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp_s),
        "webhook-signature": Signer(secret).sign(message_id, datetime.fromtimestamp(timestamp_s, UTC), body),
    }
