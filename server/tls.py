"""TLS on the public port: a context that follows its files, so that they are replaced without a restart."""

import asyncio
import os
import ssl
from pathlib import Path

import structlog

from server.config_sources import SettingsError
from server.sections import GatewaySettings

log = structlog.get_logger()

POLL_S = 2.0
"""Seconds between two looks at the files."""
VERSIONS = {"1.2": ssl.TLSVersion.TLSv1_2, "1.3": ssl.TLSVersion.TLSv1_3}


class Certificates:
    """The port's certificate, key and client CAs, read again whenever one of the files has changed.

    Connections that are open keep what they began with. Files that can't be used are logged, and the former
    ones stay. Raises SettingsError for files that can't be used at the start.
    """

    def __init__(self, gateway: GatewaySettings) -> None:
        self._gateway = gateway
        self._stamps = self._look()
        self._current = server_context(gateway)
        self.context = server_context(gateway)
        """What the port listens with; each handshake is handed on to the newest context."""
        self.context.sni_callback = self._hand_on

    @classmethod
    async def wait(cls, gateway: GatewaySettings) -> "Certificates | None":
        """As the constructor, but waits for files that can be used; None where the port has no TLS."""
        while gateway.tls_cert_file is not None:
            try:
                return cls(gateway)
            except SettingsError as error:
                log.error("tls_files_unusable", reason=str(error))
                await asyncio.sleep(POLL_S)
        return None

    async def follow(self) -> None:
        """Looks at the files every POLL_S seconds, until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            self.refresh()

    def refresh(self) -> None:
        """Reads the files again where one has changed since the last look."""
        stamps = self._look()
        if stamps == self._stamps:
            return
        self._stamps = stamps
        try:
            self._current = server_context(self._gateway)
        except SettingsError as error:
            log.error("tls_reload_failed", reason=str(error))
        else:
            log.info("tls_reloaded")

    def _hand_on(self, connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        # Called with and without a server name, before a certificate is chosen.
        connection.context = self._current

    def _look(self) -> list[tuple[int, int, int] | None]:
        files = (self._gateway.tls_cert_file, self._gateway.tls_key_file, self._gateway.tls_client_ca_file)
        return [_stamp(file) for file in files if file is not None]


def _stamp(file: Path) -> tuple[int, int, int] | None:
    try:
        found = os.stat(file)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def check_tls(gateway: GatewaySettings) -> None:
    """Raises SettingsError, one line, for TLS settings or files that can't be used."""
    if gateway.tls_cert_file is not None:
        server_context(gateway)
        return
    for name in ("tls_key_file", "tls_client_ca_file"):
        if getattr(gateway, name) is not None:
            raise SettingsError(f"gateway.{name}: needs gateway.tls_cert_file too")


def server_context(gateway: GatewaySettings) -> ssl.SSLContext:
    """A context of the files as they are now; raises SettingsError where they can't be used."""
    assert gateway.tls_cert_file is not None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = VERSIONS[gateway.tls_min_version]
    context.set_alpn_protocols(["http/1.1"])
    _load_certificate(context, gateway.tls_cert_file, gateway.tls_key_file)
    if gateway.tls_client_ca_file is not None:
        _load_client_cas(context, gateway.tls_client_ca_file)
    return context


def _load_certificate(context: ssl.SSLContext, cert: Path, key: Path | None) -> None:
    _check_readable("tls_cert_file", cert)
    if key is not None:
        _check_readable("tls_key_file", key)
    where = "tls_cert_file" if key is None else "tls_key_file"
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except _EncryptedKey:
        raise SettingsError(f"gateway.{where}: the key is encrypted, one without is needed") from None
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise SettingsError(f"gateway.{where}: the key does not belong to the certificate") from None
        raise SettingsError(f"gateway.tls_cert_file: no PEM certificate with its key in {cert}") from None


def _load_client_cas(context: ssl.SSLContext, file: Path) -> None:
    _check_readable("tls_client_ca_file", file)
    try:
        context.load_verify_locations(file)
    except ssl.SSLError:
        raise SettingsError(f"gateway.tls_client_ca_file: no PEM certificates in {file}") from None
    context.verify_mode = ssl.CERT_REQUIRED
    # A session that is taken up again would not be checked against CAs that have changed since.
    context.num_tickets = 0


def _check_readable(name: str, file: Path) -> None:
    try:
        file.open("rb").close()
    except OSError as error:
        raise SettingsError(f"gateway.{name}: can't read {file}: {error.strerror}") from None


class _EncryptedKey(Exception):
    """Raised where OpenSSL asks for a password; it would read one from the terminal."""


def _no_password() -> str:
    raise _EncryptedKey
