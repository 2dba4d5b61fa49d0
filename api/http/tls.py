"""The certificate with which the API serves HTTPS itself, where no proxy does."""

import base64
import hashlib
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from computeshare.errors import SettingsError
from computeshare.runtime.private_files import write_private
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
        from cryptography import x509
        from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

        key = x509.load_pem_x509_certificate(self.certificate.read_bytes()).public_key()
        shown = key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        return base64.b64encode(hashlib.sha256(shown).digest()).decode()

    def _make(self) -> None:
        """Make a key and a certificate signed by it. Raises SettingsError: the home cannot be written."""
        if self.certificate.exists() and self.key.exists():
            return
        from cryptography import x509
        from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, generate_private_key
        from cryptography.hazmat.primitives.hashes import SHA256
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

        key, now = generate_private_key(SECP256R1()), datetime.now(UTC)
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "ComputeShare")])
        made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        made = made.not_valid_before(now - timedelta(days=1)).not_valid_after(now + timedelta(days=DAYS))
        made = made.add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        made = made.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        made = made.add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        certificate = made.sign(key, SHA256()).public_bytes(Encoding.PEM)
        try:
            self.key.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(self.key, key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode())
            write_private(self.certificate, certificate.decode())
        except OSError as error:
            raise SettingsError(f"{self.key.parent} cannot be written: {error.strerror or error}") from error
