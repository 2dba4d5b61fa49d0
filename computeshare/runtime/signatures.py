"""Ed25519 signatures. Each names its purpose, so that it cannot be used for another."""

import json
import re
from pathlib import Path
from typing import Any, Literal, Self

from computeshare.errors import SettingsError
from computeshare.runtime.private_files import kept_private

Purpose = Literal["gateway", "join", "rotate", "seat", "recipe"]
SIGNATURE_BYTES = 64
PUBLIC_KEY = r"[0-9a-f]{64}"
"""A public key as text."""
SIGNATURE = r"[0-9a-f]{128}"
"""A signature as text."""


class SigningKey:
    """A private key. Its text is the 32 bytes of the key in hex."""

    def __init__(self, private: Any) -> None:
        self._private = private
        self.public = str(private.public_key().public_bytes_raw().hex())
        """The public key: 64 hexadecimal digits."""

    @classmethod
    def new(cls) -> Self:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return cls(Ed25519PrivateKey.generate())

    @classmethod
    def kept(cls, path: Path) -> Self:
        """The key in a file that only its owner can read, made at the first use.

        Raises: SettingsError: the file holds no key, or cannot be read or written.
        """
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        try:
            text = kept_private(path, lambda: cls.new()._text() + "\n")
            return cls(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(text)))
        except ValueError as error:
            raise SettingsError(f"{path} holds no key: put the right file there, or delete it") from error
        except OSError as error:
            raise SettingsError(f"{path} cannot be read or written: {error.strerror or error}") from error

    def sign(self, purpose: Purpose, *about: Any) -> str:
        """The signature over a purpose and JSON data: 128 hexadecimal digits."""
        return str(self._private.sign(_message(purpose, about)).hex())

    def _text(self) -> str:
        return str(self._private.private_bytes_raw().hex())


def is_signed(public: str, signature: str, purpose: Purpose, *about: Any) -> bool:
    """Whether the key with this public key has signed a purpose and JSON data. Any text may be given as a signature."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    if not (re.fullmatch(PUBLIC_KEY, public) and re.fullmatch(SIGNATURE, signature)):
        return False
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
        key.verify(bytes.fromhex(signature), _message(purpose, about))
    except InvalidSignature:
        return False
    return True


def _message(purpose: Purpose, about: tuple[Any, ...]) -> bytes:
    text = ["computeshare", purpose, *about]
    return json.dumps(text, sort_keys=True, separators=(",", ":")).encode()
