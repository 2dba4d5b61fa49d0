"""A machine's key pair for one control plane. The private key stays in a file of this machine."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from computeshare.runtime.signatures import SigningKey


@dataclass(frozen=True, slots=True)
class MachineKey:
    """A machine's current key (the file `path`) and, beside it, the next key until the control plane is known to
    accept it. Files are read at each call: another process may replace the key.
    """

    path: Path

    @property
    def _next_path(self) -> Path:
        return self.path.with_suffix(".next")

    def current(self) -> SigningKey:
        """The key, made at the first use. Raises SettingsError."""
        return SigningKey.kept(self.path)

    def next(self) -> SigningKey:
        """The key that is to replace it, made at the first use. Raises SettingsError."""
        return SigningKey.kept(self._next_path)

    def candidates(self) -> Iterator[SigningKey]:
        """The keys that the control plane may know, each once: the likeliest first. Raises SettingsError."""
        tried: set[str] = set()
        while True:
            read = [self.current, *([self.next] if self._next_path.exists() else [])]
            untried = [key for key in (each() for each in read) if key.public not in tried]
            if not untried:
                return
            tried.add(untried[0].public)
            yield untried[0]

    def accept(self, key: SigningKey) -> None:
        """Note that the control plane knows this key: if it is the next one, it becomes the current one."""
        if self._next_path.exists() and self.next().public == key.public:
            with contextlib.suppress(FileNotFoundError):  # another process has just done so
                os.replace(self._next_path, self.path)
