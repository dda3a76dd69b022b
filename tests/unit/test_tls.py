"""TLS settings and files; certificates and client CAs replaced under a running port."""

import asyncio
import shutil
import ssl
from pathlib import Path

import pytest
import uvloop

from server.config_sources import SettingsError
from server.sections import GatewaySettings
from server.tls import Certificates, check_tls
from tests.certificates import Authority


class _Port:
    """A TLS port that greets, over `certificates`."""

    def __init__(self, certificates: Certificates, ca: Path) -> None:
        self._certificates = certificates
        self._ca = ca

    async def __aenter__(self) -> "_Port":
        async def greet(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"hello")
            writer.close()

        self._server = await asyncio.start_server(greet, "127.0.0.1", 0, ssl=self._certificates.context)
        self._port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def subject(
        self, mine: tuple[Path, Path] | None = None, newest: ssl.TLSVersion = ssl.TLSVersion.TLSv1_3
    ) -> str:
        """The common name that the port shows, after a whole handshake and one answer."""
        context = ssl.create_default_context(cafile=str(self._ca))
        context.maximum_version = newest
        if mine:
            context.load_cert_chain(*mine)
        reader, writer = await asyncio.open_connection("127.0.0.1", self._port, ssl=context)
        try:
            # With TLS 1.3 a refused client certificate shows at the first read.
            if await reader.read() != b"hello":
                raise ConnectionResetError
            found = writer.get_extra_info("peercert")["subject"]
            return str(dict(pair[0] for pair in found)["commonName"])
        finally:
            writer.close()


def _settings(files: tuple[Path, Path], **more: object) -> GatewaySettings:
    return GatewaySettings.model_validate({"tls_cert_file": files[0], "tls_key_file": files[1], **more})


def test_certificates_are_replaced_without_a_restart(tmp_path: Path) -> None:
    """New connections get the new certificate; files that don't fit, or are gone, change nothing."""
    ca = Authority(tmp_path, "ca")
    (tmp_path / "used").mkdir()
    used = tmp_path / "used" / "tls.crt", tmp_path / "used" / "tls.key"

    def put(files: tuple[Path, Path]) -> None:
        for source, target in zip(files, used, strict=True):
            shutil.copy(source, target)

    first, second = ca.sign("first"), ca.sign("second")
    put(first)

    async def run() -> None:
        certificates = Certificates(_settings(used))
        async with _Port(certificates, ca.file) as port:
            assert await port.subject() == "first"
            put((second[0], first[1]))
            certificates.refresh()
            assert await port.subject() == "first"
            used[0].unlink()
            certificates.refresh()
            assert await port.subject() == "first"
            put(second)
            certificates.refresh()
            assert await port.subject() == "second"

    uvloop.run(run())


def test_old_versions_are_refused(tmp_path: Path) -> None:
    """TLS 1.3 alone by default; 1.2 where the settings say so."""
    ca = Authority(tmp_path, "ca")
    files = ca.sign("server")

    async def run() -> None:
        async with _Port(Certificates(_settings(files)), ca.file) as port:
            with pytest.raises((ssl.SSLError, ConnectionError)):
                await port.subject(newest=ssl.TLSVersion.TLSv1_2)
        async with _Port(Certificates(_settings(files, tls_min_version=1.2)), ca.file) as port:
            assert await port.subject(newest=ssl.TLSVersion.TLSv1_2) == "server"

    uvloop.run(run())


def test_client_certificates(tmp_path: Path) -> None:
    """With client CAs: none and a stranger's are refused; the CAs are replaced like the certificate."""
    ca, others = Authority(tmp_path, "ca"), Authority(tmp_path, "others")
    files, mine, theirs = ca.sign("server"), ca.sign("client"), others.sign("stranger")
    trusted = tmp_path / "trusted.pem"
    shutil.copy(ca.file, trusted)

    async def refused(port: _Port, client: tuple[Path, Path] | None) -> bool:
        try:
            await port.subject(client)
        except (ssl.SSLError, ConnectionError):
            return True
        return False

    async def run() -> None:
        certificates = Certificates(_settings(files, tls_client_ca_file=trusted))
        async with _Port(certificates, ca.file) as port:
            assert await refused(port, None)
            assert await refused(port, theirs)
            assert await port.subject(mine) == "server"
            shutil.copy(others.file, trusted)
            certificates.refresh()
            assert await refused(port, mine)
            assert await port.subject(theirs) == "server"

    uvloop.run(run())


def test_bad_files_are_one_line(tmp_path: Path) -> None:
    """Each mistake is named with its setting, and nothing asks for a password."""
    ca = Authority(tmp_path, "ca")
    cert, key = ca.sign("good")
    _, other = ca.sign("other")
    secret = ca.sign("secret", password=b"open sesame")
    empty, missing = tmp_path / "empty", tmp_path / "missing"
    empty.touch()
    cases: list[tuple[dict[str, Path], str]] = [
        ({"tls_cert_file": missing}, f"gateway.tls_cert_file: can't read {missing}: No such file"),
        ({"tls_cert_file": empty}, "gateway.tls_cert_file: no PEM certificate"),
        ({"tls_cert_file": cert}, "gateway.tls_cert_file: no PEM certificate"),
        ({"tls_cert_file": cert, "tls_key_file": missing}, "gateway.tls_key_file: can't read"),
        ({"tls_cert_file": cert, "tls_key_file": other}, "gateway.tls_key_file: the key does not belong"),
        ({"tls_cert_file": secret[0], "tls_key_file": secret[1]}, "gateway.tls_key_file: the key is encr"),
        ({"tls_cert_file": cert, "tls_key_file": key, "tls_client_ca_file": empty}, "gateway.tls_client_ca"),
        ({"tls_key_file": key}, "gateway.tls_key_file: needs gateway.tls_cert_file"),
        ({"tls_client_ca_file": ca.file}, "gateway.tls_client_ca_file: needs"),
    ]
    for given, says in cases:
        with pytest.raises(SettingsError) as caught:
            check_tls(GatewaySettings.model_validate(given))
        assert str(caught.value).startswith(says)
        assert "\n" not in str(caught.value)
    check_tls(_settings((cert, key)))
    check_tls(GatewaySettings())
    both = tmp_path / "both.pem"
    both.write_bytes(key.read_bytes() + cert.read_bytes())
    check_tls(GatewaySettings.model_validate({"tls_cert_file": both}))


def test_a_worker_waits_for_files_it_can_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that replaces another does not die of a half-written certificate."""
    monkeypatch.setattr("server.tls.POLL_S", 0.01)
    ca = Authority(tmp_path, "ca")
    cert, key = ca.sign("server")
    whole = cert.read_bytes()
    cert.write_bytes(whole[:100])

    async def run() -> None:
        waiting = asyncio.create_task(Certificates.wait(_settings((cert, key))))
        done, _ = await asyncio.wait({waiting}, timeout=0.05)
        assert not done
        cert.write_bytes(whole)
        assert await asyncio.wait_for(waiting, 10) is not None
        assert await Certificates.wait(GatewaySettings()) is None

    asyncio.run(run())
