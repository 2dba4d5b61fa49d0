"""The certificate with which the API serves HTTPS itself, where no proxy does."""

import base64
import hashlib
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

from computeshare.errors import SettingsError
from computeshare.settings import Settings

DAYS = 3650


@dataclass(frozen=True, slots=True)
class Certificate:
    """Files in PEM: a certificate, with those that it depends on, and its key.

    `pinned`: it was made here, so that clients must be told its fingerprint.
    """

    certificate: Path
    key: Path
    pinned: bool = False

    @classmethod
    def of(cls, settings: Settings) -> "Certificate | None":
        """The one that the settings name, made at the first use of `self`; None: the API serves no HTTPS.

        Raises: SettingsError: only one file is named, or none can be made.
        """
        if settings.tls == "self":
            made = cls(settings.home / "tls" / "certificate.pem", settings.home / "tls" / "key.pem", pinned=True)
            made._make()
            return made
        if bool(settings.tls_cert) != bool(settings.tls_key):
            raise SettingsError("--tls-cert and --tls-key belong together: give both files, in PEM")
        return cls(settings.tls_cert, settings.tls_key) if settings.tls_cert and settings.tls_key else None

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the certificate, in hex, if clients must be told it; else empty."""
        if not self.pinned:
            return ""
        return hashlib.sha256(ssl.PEM_cert_to_DER_cert(self.certificate.read_text())).hexdigest()

    @property
    def key_pin(self) -> str:
        """SHA-256 of the public key, in base64, as `curl --pinnedpubkey` takes it; empty where `fingerprint` is."""
        if not self.pinned:
            return ""
        command = ["openssl", "pkey", "-in", str(self.key), "-pubout", "-outform", "der"]
        return base64.b64encode(hashlib.sha256(_openssl(command)).digest()).decode()

    def _make(self) -> None:
        if self.certificate.exists() and self.key.exists():
            return
        folder = self.certificate.parent
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command += ["-days", str(DAYS), "-subj", "/CN=ComputeShare", "-keyout", str(self.key), "-out"]
        _openssl([*command, str(self.certificate)])
        self.key.chmod(0o600)


def _openssl(command: list[str]) -> bytes:
    try:
        return subprocess.run(command, check=True, capture_output=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise SettingsError(f"--tls self needs the program openssl, which failed: {error}") from error
