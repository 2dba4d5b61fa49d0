"""The security headers of every answer."""

from starlette.datastructures import MutableHeaders

YEAR_S = 365 * 24 * 3600
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; font-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "x-robots-tag": "noindex, nofollow",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "accelerometer=(), camera=(), display-capture=(), geolocation=(), gyroscope=(), "
    "magnetometer=(), microphone=(), midi=(), payment=(), usb=(), screen-wake-lock=(), clipboard-read=()",
}
FRESH = "no-cache"
"""For static files: asked for again by their ETag, so that they are new after an upgrade."""
PRIVATE = "private, no-cache"
"""For all other answers: shared caches do not keep them, and browsers ask again."""
HSTS = f"max-age={YEAR_S}"


def add_headers(headers: MutableHeaders, path: str, scheme: str, host: str) -> None:
    """Add the headers that an answer has not set itself. `host`: the name in the request, without its port."""
    for name, value in HEADERS.items():
        headers.setdefault(name, value)
    headers.setdefault("cache-control", FRESH if path.startswith("/static/") else PRIVATE)
    if scheme == "https" and host not in LOOPBACK:  # other programs on this machine serve localhost without TLS
        headers.setdefault("strict-transport-security", HSTS)
