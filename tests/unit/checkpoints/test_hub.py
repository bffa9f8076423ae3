"""Checkpoints of a model hub: `hf://ORG/MODEL@REVISION`, from the address in HF_ENDPOINT."""

from __future__ import annotations

import http.server
import json
import os
import re
import subprocess
import sys
import threading
import urllib.parse
from collections.abc import Iterator
from pathlib import Path

import pytest

from sylvan.config.checkpoint import model_dir
from sylvan.protocol.errors import ConfigError
from tests.support.random_model import write_random_model

pytest.importorskip("huggingface_hub")

NAME, REVISION, TOKEN = "org/tiny", "v2", "hf_secret"
_FETCH = """
import sys
from pathlib import Path
from sylvan.checkpoints.remote import fetch
from sylvan.protocol.errors import ConfigError
try:
    print(fetch(sys.argv[1], Path(sys.argv[2])))
except ConfigError as error:
    sys.exit(str(error))
"""


class Hub(http.server.BaseHTTPRequestHandler):
    """As much of the hub's API as its file system asks; one model, which needs a token."""

    folder: Path

    def do_GET(self) -> None:
        url = urllib.parse.urlsplit(self.path)
        path = urllib.parse.unquote(url.path)
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.reply({"error": "Invalid credentials"}, 401)
        elif path in (f"/api/models/{NAME}/revision/{REVISION}", f"/api/models/{NAME}"):
            self.reply({"id": NAME, "sha": "0" * 40, "siblings": [], "private": False, "tags": []})
        elif path.startswith(f"/api/models/{NAME}/tree/{REVISION}"):
            self.reply([self.entry(file.name) for file in sorted(self.folder.iterdir())])
        elif match := re.fullmatch(f"/{NAME}/resolve/{REVISION}/([^/]+)", path):
            self.send(match[1])
        else:
            self.reply({"error": "Revision Not Found"}, 404)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        sent = self.rfile.read(int(self.headers["Content-Length"])).decode()
        try:
            paths = json.loads(sent)["paths"]
        except ValueError:
            paths = urllib.parse.parse_qs(sent)["paths"]
        there = [path for path in paths if (self.folder / path).is_file()]
        self.reply([self.entry(path) for path in there])

    def entry(self, name: str) -> dict[str, object]:
        size = (self.folder / name).stat().st_size
        return {"type": "file", "path": name, "size": size, "oid": f"{size:040x}"}

    def send(self, name: str) -> None:
        data = (self.folder / name).read_bytes()
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        status = 206 if part else 200
        if part:
            data = data[int(part[1]) : int(part[2]) + 1 if part[2] else None]
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("ETag", '"1"')
        self.send_header("X-Repo-Commit", "0" * 40)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def reply(self, body: object, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory) -> Iterator[tuple[str, Path]]:
    """The address of a hub, and what its model contains."""
    folder = write_random_model(tmp_path_factory.mktemp("hub") / "tiny")
    handler = type("Served", (Hub,), {"folder": folder})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", folder
        server.shutdown()
        thread.join()


def fetched(
    hub: str, url: str, cache: Path, token: str = TOKEN
) -> subprocess.CompletedProcess[str]:
    """Return the output of `fetch` in a process with this hub."""
    return subprocess.run(
        [sys.executable, "-c", _FETCH, url, str(cache)],
        env=os.environ | {"HF_ENDPOINT": hub, "HF_TOKEN": token, "HF_HOME": str(cache / "home")},
        capture_output=True,
        check=False,
        text=True,
        timeout=120,
    )


def test_a_model_of_the_hub_is_fetched_at_its_revision(hub, tmp_path):
    address, model = hub

    done = fetched(address, f"hf://{NAME}@{REVISION}", tmp_path)

    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    for file in model.iterdir():
        assert (folder / file.name).read_bytes() == file.read_bytes()
    assert model_dir(str(folder)) == folder


@pytest.mark.parametrize(
    ("url", "token"), [(f"hf://{NAME}@v9", TOKEN), (f"hf://{NAME}@{REVISION}", "wrong")]
)
def test_what_the_hub_refuses_is_one_sentence(hub, tmp_path, url, token):
    done = fetched(hub[0], url, tmp_path, token)

    assert done.returncode == 1
    assert done.stderr.startswith(f"model: {url!r}"), done.stderr
    assert TOKEN not in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_the_name_of_a_model_on_a_hub_is_no_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ConfigError, match=r"hf://Qwen/Qwen3-0\.6B"):
        model_dir("Qwen/Qwen3-0.6B")
