from __future__ import annotations

import socketserver
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from sylvan.cli.main import main


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/ready" else 503)
        self.end_headers()

    def address_string(self):
        return "somebody"

    def log_message(self, *_):
        pass


class UnixServer(socketserver.UnixStreamServer):
    def get_request(self):
        request, _ = super().get_request()
        return request, ("", 0)


@pytest.fixture(params=["tcp", "unix"])
def url(request, tmp_path):
    path = str(tmp_path / "socket")
    tcp = request.param == "tcp"
    server = HTTPServer(("127.0.0.1", 0), Handler) if tcp else UnixServer(path, Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}" if tcp else f"unix:{path}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_server_that_answers_is_well(url):
    assert main(["health", url]) == 0


def test_another_status_is_reported(url, capsys):
    assert main(["health", url, "--path", "/health_generate"]) == 1
    assert capsys.readouterr().err == f"{url}/health_generate: status 503\n"


def test_an_unreachable_server_is_reported(tmp_path, capsys):
    assert main(["health", f"unix:{tmp_path}/none"]) == 1
    assert "No such file" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [("ftp://a",), ("http://a:x",), ("--timeout", "0"), ("--path", "ready")]
)
def test_what_cannot_be_asked_is_refused(words, capsys):
    assert main(["health", *words]) == 2
    assert capsys.readouterr().err.startswith("sylvan: error: ")
