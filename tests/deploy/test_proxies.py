"""The examples of nginx and Caddy, run by the real servers in front of a real one."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from tests.support.tiny import write_model

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "deploy/proxies"
NAME = "llm.example.com"
PATIENCE_S = 90


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


@contextlib.contextmanager
def running(command: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, cwd=folder)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(PATIENCE_S)


def until(happened, log: Path | None = None) -> None:
    for _ in range(PATIENCE_S * 20):
        with contextlib.suppress(httpx.HTTPError, OSError):
            if happened():
                return
        time.sleep(0.05)
    raise AssertionError(log.read_text() if log else "it did not happen")


@pytest.fixture(scope="module")
def certificate(tmp_path_factory) -> Path:
    """Folder with `cert.pem` and `key.pem` of the name."""
    folder = tmp_path_factory.mktemp("certificate")
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, NAME)])
    now = datetime.datetime.now(datetime.UTC)
    names = [x509.DNSName(NAME), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    made = x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
    made = made.not_valid_before(now - datetime.timedelta(days=1))
    made = made.not_valid_after(now + datetime.timedelta(days=1))
    made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
    pem = serialization.Encoding.PEM
    (folder / "cert.pem").write_bytes(made.sign(key, hashes.SHA256()).public_bytes(pem))
    plain = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    (folder / "key.pem").write_bytes(plain)
    return folder


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[str]:
    """A server that believes proxies of loopback, and logs who calls."""
    folder = tmp_path_factory.mktemp("server")
    model = str(write_model(folder / "model"))
    port = free_port()
    command = [sys.executable, "-m", "sylvan", "serve", model, "--port", str(port)]
    command += ["--load-format", "dummy", "--device", "cpu", "--threads", "1"]
    command += ["--processes", "one", "--server.trusted-proxies", "127.0.0.1"]
    command += ["--server.allowed-hosts", NAME, "--limits.text-chars", str(4 << 20)]
    url = f"http://127.0.0.1:{port}"
    with running(command, folder):
        until(lambda: httpx.get(f"{url}/ready").status_code == 200, folder / "log")
        yield url


def nginx(folder: Path, certificate: Path, upstream: str, port: int) -> list[str]:
    text = (EXAMPLES / "nginx.conf").read_text()
    text = text.replace("127.0.0.1:30000", upstream)
    text = text.replace("/etc/ssl/sylvan", str(certificate))
    text = re.sub(r"listen 443 ", f"listen 127.0.0.1:{port} ", text)
    text = re.sub(r"\n *listen \[::\].*", "", text)
    (folder / "sylvan.conf").write_text(text)
    places = "".join(
        f"{name}_temp_path {folder}/{name};\n"
        for name in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    whole = f"pid {folder}/pid; daemon off; error_log stderr;\nevents {{}}\n"
    whole = (
        f"user root;\n{whole}" if os.geteuid() == 0 else whole
    )  # otherwise nobody, a user without access to this folder
    whole += f"http {{ access_log off;\n{places} include {folder}/sylvan.conf; }}\n"
    (folder / "nginx.conf").write_text(whole)
    return ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")]


def caddy(folder: Path, certificate: Path, upstream: str, port: int) -> list[str]:
    text = (EXAMPLES / "Caddyfile").read_text().replace("127.0.0.1:30000", upstream)
    tls = f"\ttls {certificate}/cert.pem {certificate}/key.pem"
    text = text.replace(f"{NAME} {{", f"{NAME}:{port} {{\n\tbind 127.0.0.1\n{tls}")
    head = "{\n\tadmin off\n\tauto_https disable_redirects\n\tstorage file_system "
    (folder / "Caddyfile").write_text(f"{head}{folder}\n}}\n{text}")
    return ["caddy", "run", "--config", str(folder / "Caddyfile"), "--adapter", "caddyfile"]


PROXIES = {"nginx": nginx, "caddy": caddy}


class Proxy:
    """A proxy under its name, asked by curl, which speaks HTTP/2."""

    def __init__(self, port: int, certificate: Path) -> None:
        self.url = f"https://{NAME}:{port}"
        resolve = ["--resolve", f"{NAME}:{port}:127.0.0.1"]
        cert = ["--cacert", str(certificate / "cert.pem")]
        self._start = ["curl", "-sS", "--http2", "--max-time", str(PATIENCE_S), *resolve, *cert]

    def command(self, path: str, *words: str) -> list[str]:
        return [*self._start, *words, f"{self.url}{path}"]

    def ask(self, path: str, *words: str) -> str:
        run = subprocess.run(self.command(path, *words), capture_output=True, text=True, check=True)
        return run.stdout


def posted(body: dict[str, object]) -> list[str]:
    return ["-N", "-H", "Content-Type: application/json", "-d", json.dumps(body)]


def generation(tokens: int) -> list[str]:
    params = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0.0}
    return posted({"text": "a", "stream": True, "sampling_params": params})


@pytest.fixture(params=sorted(PROXIES), scope="module")
def proxy(request, tmp_path_factory, certificate, server) -> Iterator[Proxy]:
    for program in (request.param, "curl"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    folder = tmp_path_factory.mktemp(request.param)
    port = free_port()
    upstream = server.removeprefix("http://")
    with running(PROXIES[request.param](folder, certificate, upstream, port), folder):
        proxy = Proxy(port, certificate)
        status = ["-o", "/dev/null", "-w", "%{http_code}", "--retry", "0"]

        def answers() -> bool:
            run = subprocess.run(proxy.command("/ready", *status), capture_output=True, check=False)
            return run.stdout == b"200"

        until(answers, folder / "log")
        yield proxy


def aborted_requests(server: str) -> float:
    text = httpx.get(f"{server}/metrics", timeout=PATIENCE_S).text
    found = re.findall(r"^sglang:num_aborted_requests_total\{.*\} (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


def test_http_2_is_spoken_and_metrics_stay_inside(proxy, server):
    told = proxy.ask("/v1/models", "-o", "/dev/null", "-w", "%{http_version} %{http_code}")
    assert told == "2 200"
    assert proxy.ask("/metrics", "-o", "/dev/null", "-w", "%{http_code}") == "404"


def test_a_stream_is_the_same_through_the_proxy_and_comes_as_it_is_made(proxy, server):
    body = generation(300)
    with subprocess.Popen(proxy.command("/generate", *body), stdout=subprocess.PIPE) as curl:
        assert curl.stdout is not None
        first = curl.stdout.readline()
        assert first.startswith(b"data: {")
        assert json.loads(first[6:])["meta_info"]["finish_reason"] is None  # more is to come
        rest = curl.stdout.read()
    direct = subprocess.run(
        ["curl", "-sS", *body, f"{server}/generate"], capture_output=True, check=True
    )
    texts = [
        [json.loads(line[6:])["text"] for line in raw.splitlines() if line.startswith(b"data: {")]
        for raw in (first + rest, direct.stdout)
    ]
    assert texts[0][-1] == texts[1][-1]
    assert rest.endswith(b"data: [DONE]\n\n")


def test_a_client_that_goes_away_ends_its_request(proxy, server):
    before = aborted_requests(server)
    with subprocess.Popen(
        proxy.command("/generate", *generation(16_000)), stdout=subprocess.PIPE
    ) as curl:
        assert curl.stdout is not None
        assert curl.stdout.readline().startswith(b"data: {")
        curl.kill()
    until(lambda: aborted_requests(server) == before + 1)


def test_many_streams_share_one_connection(proxy, server):
    command = [*proxy._start, "-Z", *generation(40)]
    urls = [f"{proxy.url}/generate"] * 8
    run = subprocess.run([*command, *urls], capture_output=True, check=True)
    assert run.stdout.count(b"data: [DONE]") == 8


def test_bodies_of_some_megabytes_pass(proxy, tmp_path):
    body = tmp_path / "body"
    body.write_text(json.dumps({"prompt": "a " * 1_500_000}))
    told = proxy.ask("/tokenize", "-H", "Content-Type: application/json", "-d", f"@{body}")
    assert json.loads(told)["count"] > 1_000_000


def pages(url: str, headers: dict[str, str]) -> str:
    """The first page names the address that its reader used."""
    return httpx.get(f"{url}/", headers={"Accept": "text/plain", **headers}).text


def test_the_word_of_a_trusted_proxy_counts(server, proxy):
    assert f"https://{NAME}" in proxy.ask("/", "-H", "Accept: text/plain")
    assert "https://" in pages(server, {"X-Forwarded-Proto": "https"})


def test_others_are_not_believed(tmp_path):
    model = str(write_model(tmp_path / "model"))
    port = free_port()
    command = [sys.executable, "-m", "sylvan", "serve", model, "--port", str(port)]
    command += ["--load-format", "dummy", "--device", "cpu", "--threads", "1"]
    command += ["--processes", "one", "--server.trusted-proxies", "10.0.0.0/8"]
    url = f"http://127.0.0.1:{port}"
    with running(command, tmp_path):
        until(lambda: httpx.get(f"{url}/ready").status_code == 200, tmp_path / "log")
        assert url in pages(url, {"X-Forwarded-Proto": "https"})
