"""TLS: the server speaks it with the files it is given, and only then."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest

from sylvan.cli.certificates import Certificates
from sylvan.cli.http import HttpServer
from sylvan.config.tree import LimitsConfig, ServerConfig
from sylvan.config.values import Secret
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.server.connections import ConnectionLimits, Connections
from tests.support.http import Client, checkpoint, engine

__all__ = ["checkpoint", "engine"]

PASSWORD = "of the key"
needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="makes certificates")


def write_pair(folder: Path, name: str = "127.0.0.1") -> tuple[str, str]:
    """A certificate and its encrypted key."""
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1"]
    command += ["-days", "2", "-passout", f"pass:{PASSWORD}", "-keyout", key, "-out", cert]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Certificate and encrypted key of 127.0.0.1."""
    return write_pair(tmp_path_factory.mktemp("tls"))


def connections():
    return Connections(ConnectionLimits.from_config(LimitsConfig()))


def config(pair, password=PASSWORD):
    cert, key = pair
    secret = Secret(password) if password else None
    return ServerConfig(ssl_certfile=cert, ssl_keyfile=key, ssl_keyfile_password=secret)


@needs_openssl
async def test_a_server_with_a_certificate_speaks_tls_only(engine, pair):
    app = Client(engine).app
    with socket.create_server(("127.0.0.1", 0)) as sock:
        async with HttpServer(app, config(pair), sock, connections()) as server:
            trusting = ssl.create_default_context(cafile=pair[0])
            async with httpx.AsyncClient(verify=trusting) as http:
                url = f"https://127.0.0.1:{server.port}"
                reply = await http.post(f"{url}/generate", json={"text": "ab"})
                assert reply.json()["text"] == "ab"
                with pytest.raises(httpx.TransportError):
                    await http.get(f"http://127.0.0.1:{server.port}/ready")
            async with httpx.AsyncClient() as stranger:
                with pytest.raises(httpx.ConnectError, match="certificate"):
                    await stranger.get(url)


@needs_openssl
async def test_a_key_that_cannot_be_read_is_named(engine, pair):
    with pytest.raises(ConfigError, match="ssl_keyfile"):
        HttpServer(Client(engine).app, config(pair, "wrong"), None, connections())


async def test_a_certificate_that_is_not_there_is_named(engine, tmp_path):
    missing = str(tmp_path / "none.pem")
    with pytest.raises(ConfigError, match="ssl_certfile"):
        HttpServer(Client(engine).app, config((missing, missing)), None, connections())


async def shown(port: int) -> bytes:
    """The certificate that a new connection gets."""
    blind = ssl.create_default_context()
    blind.check_hostname, blind.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=blind)
    try:
        return writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    finally:
        writer.close()


@needs_openssl
async def test_new_connections_get_the_certificate_that_is_in_the_files_now(
    engine, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(Certificates.watch, "__defaults__", (0.01,))
    cert, key = (Path(name) for name in write_pair(tmp_path))
    (tmp_path / "new").mkdir()
    new_cert, new_key = (Path(name) for name in write_pair(tmp_path / "new", "renewed"))
    old = cert.read_bytes()
    app = Client(engine).app
    with socket.create_server(("127.0.0.1", 0)) as sock:
        async with (
            HttpServer(app, config((str(cert), str(key))), sock, connections()) as server,
            httpx.AsyncClient(verify=ssl.create_default_context(cafile=str(cert))) as early,
        ):
            url = f"https://127.0.0.1:{server.port}/ready"
            assert (await early.get(url)).status_code == 200
            before = await shown(server.port)
            assert before == ssl.PEM_cert_to_DER_cert(old.decode())

            cert.write_bytes(new_cert.read_bytes())  # and not yet its key
            while "the old certificate stays in use" not in caplog.text:
                await asyncio.sleep(0.01)
            assert await shown(server.port) == before

            key.write_bytes(new_key.read_bytes())
            while (after := await shown(server.port)) == before:
                await asyncio.sleep(0.01)
            assert after == ssl.PEM_cert_to_DER_cert(new_cert.read_text())
            assert (await early.get(url)).status_code == 200, "its connection stays"
