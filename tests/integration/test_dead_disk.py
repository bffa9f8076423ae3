"""A disk that fails or hangs under a server: affected calls fail or wait, and nothing is lost."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.conftest import running
from tests.support.random_model import write_random_model
from tests.support.transfer import until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="the disk's stand-in is written in C"),
]

SHIM = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* 0, or -1 with EIO; waits while the file says that the disk hangs. Other files are left alone. */
static int disk(int fd) {
    const char *folder = getenv("DISK_FOLDER"), *mode = getenv("DISK_MODE");
    char link[64], path[4096], word[8];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, sizeof path - 1);
    if (!folder || !mode || size < 0) return 0;
    path[size] = 0;
    if (strncmp(path, folder, strlen(folder))) return 0;
    for (;;) {
        FILE *file = fopen(mode, "r");
        if (!file) return 0;
        size_t read = fread(word, 1, sizeof word - 1, file);
        fclose(file);
        word[read] = 0;
        if (!strcmp(word, "fail")) { errno = EIO; return -1; }
        if (strcmp(word, "hang")) return 0;
        usleep(10000);
    }
}

#define PAGES(name, type)                                                      \
    ssize_t name(int fd, type data, size_t size, off64_t at) {                 \
        static ssize_t (*real)(int, type, size_t, off64_t);                    \
        if (!real) real = dlsym(RTLD_NEXT, #name);                             \
        return disk(fd) ? -1 : real(fd, data, size, at);                       \
    }
#define SYNC(name)                                                             \
    int name(int fd) {                                                         \
        static int (*real)(int);                                               \
        if (!real) real = dlsym(RTLD_NEXT, #name);                             \
        return disk(fd) ? -1 : real(fd);                                       \
    }
PAGES(pwrite64, const void *)
PAGES(pwrite, const void *)
PAGES(pread64, void *)
PAGES(pread, void *)
SYNC(fsync)
SYNC(fdatasync)
"""
LINES = 24


class Disk:
    """Where the server keeps files and batches; it does what its mode says."""

    def __init__(self, folder: Path, mode: Path) -> None:
        self.folder = folder
        self._mode = mode

    def becomes(self, mode: str) -> None:
        new = self._mode.with_suffix(".new")
        new.write_text(mode)
        new.replace(self._mode)


@pytest.fixture
def disk(tmp_path, monkeypatch):
    library = tmp_path / "disk.so"
    command = ["gcc", "-shared", "-fPIC", "-O1", "-x", "c", "-", "-o", str(library), "-ldl"]
    subprocess.run(command, input=SHIM, text=True, check=True)
    found = Disk(tmp_path / "data", tmp_path / "mode")
    found.folder.mkdir()
    found.becomes("well")
    monkeypatch.setenv("LD_PRELOAD", str(library))
    monkeypatch.setenv("DISK_FOLDER", str(found.folder))
    monkeypatch.setenv("DISK_MODE", str(tmp_path / "mode"))
    return found


@pytest.fixture
def http(tmp_path, disk):
    model = str(write_random_model(tmp_path / "model"))
    with (
        running(model, "--server.data-dir", str(disk.folder)) as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
    ):
        yield client
        disk.becomes("well")


def generated(http):
    sampling = {"max_new_tokens": 12, "temperature": 0, "ignore_eos": True}
    answer = http.post("/generate", json={"text": "once", "sampling_params": sampling})
    assert answer.status_code == 200, answer.text
    return answer.json()["output_ids"]


def upload(http, content):
    files = {"file": ("in.jsonl", content)}
    return http.post("/v1/files", files=files, data={"purpose": "batch"})


def lines():
    body = {"max_tokens": 40, "temperature": 0, "ignore_eos": True}
    for number in range(LINES):
        line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/completions"}
        yield json.dumps({**line, "body": {**body, "prompt": f"line {number}"}})


def test_a_disk_that_fails_and_comes_back(http, disk):
    wanted = generated(http)
    content = "\n".join(lines()).encode()
    first = upload(http, content).json()["id"]
    ask = {"input_file_id": first, "endpoint": "/v1/completions", "completion_window": "24h"}
    batch = http.post("/v1/batches", json=ask).json()["id"]

    def state():
        return http.get(f"/v1/batches/{batch}").json()

    until(lambda: state()["request_counts"]["completed"])
    disk.becomes("fail")
    for _ in range(3):
        refused = upload(http, b"{}\n")
        assert refused.status_code == 503, refused.text
        assert "disk" in refused.json()["error"]["message"]
        assert generated(http) == wanted
        assert http.get("/live").status_code == 200
    disk.becomes("well")

    second = upload(http, b"{}\n").json()["id"]
    done = until(lambda: s if (s := state())["status"] == "completed" else None)
    output = http.get(f"/v1/files/{done['output_file_id']}/content").text.splitlines()
    assert sorted(json.loads(line)["custom_id"] for line in output) == sorted(
        f"r{number}" for number in range(LINES)
    )
    assert http.get(f"/v1/files/{first}/content").content == content
    assert http.get(f"/v1/files/{second}/content").content == b"{}\n"
    assert {file["id"] for file in http.get("/v1/files").json()["data"]} >= {first, second}


def test_who_needs_a_disk_that_hangs_waits_alone(http, disk):
    wanted = generated(http)
    answers = []
    disk.becomes("hang")
    waiting = threading.Thread(target=lambda: answers.append(upload(http, b"{}\n")))
    waiting.start()
    for _ in range(5):
        assert generated(http) == wanted
        assert http.get("/live").status_code == 200
        time.sleep(0.1)  # the upload is surely there by now
    assert not answers
    disk.becomes("well")
    waiting.join(60)

    [answer] = answers
    assert answer.status_code == 200, answer.text
    assert http.get(f"/v1/files/{answer.json()['id']}/content").content == b"{}\n"
