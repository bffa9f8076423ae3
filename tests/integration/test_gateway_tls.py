"""Servers that only speak to clients with a certificate, behind a gateway that has one."""

from __future__ import annotations

import shutil
import socket
import ssl
import subprocess
from dataclasses import dataclass

import httpx
import pytest

from tests.integration.test_gateway_failover import serving
from tests.support.cluster import gateway
from tests.support.tiny import write_model

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
BODY = {"prompt": "abc", "max_tokens": 8, "ignore_eos": True, "seed": 1}


@dataclass(frozen=True)
class Certificates:
    """An authority, a pair of the server, and a pair of a client."""

    ca: str
    server: tuple[str, str]
    client: tuple[str, str]


def openssl(*words):
    subprocess.run(["openssl", *map(str, words)], check=True, capture_output=True)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tls")
    curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
    ca, ca_key = folder / "ca.pem", folder / "ca.key"
    openssl("req", "-x509", *curve, "-subj", "/CN=authority", "-keyout", ca_key, "-out", ca)
    pairs = []
    for name in ("server", "client"):
        cert, key, request = (folder / f"{name}.{end}" for end in ("pem", "key", "csr"))
        openssl("req", *curve, "-subj", f"/CN={name}", "-keyout", key, "-out", request)
        extra = folder / f"{name}.cnf"
        extra.write_text("subjectAltName=IP:127.0.0.1\n")
        signed = ("-CA", ca, "-CAkey", ca_key, "-CAcreateserial", "-extfile", extra)
        openssl("x509", "-req", "-in", request, *signed, "-days", "2", "-out", cert)
        pairs.append((str(cert), str(key)))
    return Certificates(str(ca), *pairs)


@pytest.fixture(scope="module")
def server(certificates, tmp_path_factory):
    """One that speaks HTTP and gRPC, both with certificates on both sides."""
    model = str(write_model(tmp_path_factory.mktemp("model")))
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    cert, key = certificates.server
    flags = ("--ssl-certfile", cert, "--ssl-keyfile", key, "--ssl-ca-certs", certificates.ca)
    with serving(model, *flags, "--grpc-port", str(port)) as process:
        assert process.url.startswith("https://")
        yield process.url, f"grpcs://127.0.0.1:{port}"


def shown(certificates):
    cert, key = certificates.client
    return {
        "workers__client_certfile": cert,
        "workers__client_keyfile": key,
        "workers__ca_certfiles": (certificates.ca,),
    }


def trusting(certificates, *, shows):
    context = ssl.create_default_context(cafile=certificates.ca)
    if shows:
        context.load_cert_chain(*certificates.client)
    return context


async def test_a_gateway_with_a_certificate_is_let_in(certificates, server):
    https, grpcs = server
    async with httpx.AsyncClient(verify=trusting(certificates, shows=True)) as http:
        alone = (await http.post(f"{https}/v1/completions", json=BODY)).json()["choices"]
    for url in (https, grpcs):
        async with gateway(url, **shown(certificates)) as front:
            reply = await front.post("/v1/completions", BODY)
            assert reply.json()["choices"] == alone


async def test_others_are_rejected(certificates, server):
    async with httpx.AsyncClient(verify=trusting(certificates, shows=False)) as http:
        with pytest.raises(httpx.TransportError):
            await http.get(f"{server[0]}/live")
    for url in server:
        only_trusts = {"workers__ca_certfiles": (certificates.ca,)}
        async with gateway(url, wait=0, workers__startup_timeout_s=0.5, **only_trusts) as front:
            await front.runtime.jobs.wait_all()
            jobs = (await front.get("/workers")).json()
            reply = await front.post("/v1/completions", BODY)
            assert reply.status_code == 503, (reply.text, jobs)


async def test_a_server_of_an_unknown_authority_gets_nothing(certificates, server):
    mine = {k: v for k, v in shown(certificates).items() if k != "workers__ca_certfiles"}
    async with gateway(server[0], wait=0, workers__startup_timeout_s=0.5, **mine) as front:
        await front.runtime.jobs.wait_all()
        assert (await front.post("/v1/completions", BODY)).status_code == 503
