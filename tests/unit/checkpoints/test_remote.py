"""Remote checkpoints: fetched once, whole or not at all, gone on with after a break."""

from __future__ import annotations

import functools
import http.server
import json
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from sylvan.checkpoints.remote import chosen, fetch, is_remote
from sylvan.cli.main import main
from sylvan.config.checkpoint import model_dir, model_facts
from sylvan.protocol.errors import ConfigError
from tests.support.random_model import write_random_model

fsspec = pytest.importorskip("fsspec")

ROOT = "/bucket/models/tiny"
URL = f"memory:/{ROOT}"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def remote(model) -> Iterator[fsspec.AbstractFileSystem]:
    """A bucket in memory with a model in it."""
    system = fsspec.filesystem("memory")
    for file in model.iterdir():
        system.pipe_file(f"{ROOT}/{file.name}", file.read_bytes())
    yield system
    system.rm("/bucket", recursive=True)


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def contents(folder: Path) -> dict[str, bytes]:
    return {f.name: f.read_bytes() for f in folder.iterdir() if not f.name.startswith(".")}


def same(folder: Path, model: Path) -> bool:
    there = contents(folder)
    there.pop("sylvan-fetched.json")
    return there == contents(model)


def test_a_url_is_a_model(remote, model, cache):
    folder = model_dir(URL)

    assert folder.is_relative_to(cache)
    assert same(folder, model)
    assert model_facts(URL).num_params == model_facts(str(model)).num_params


def test_a_model_is_fetched_once(remote, cache, monkeypatch):
    first = model_dir(URL)
    monkeypatch.setattr(type(remote), "cat_file", None)
    monkeypatch.setattr(type(remote), "find", None)

    assert model_dir(URL) == first


def test_progress_ends_at_the_size(remote, model, tmp_path):
    seen: list[tuple[int, int]] = []

    fetch(URL, tmp_path, lambda *now: seen.append(now))

    size = sum(file.stat().st_size for file in model.iterdir())
    assert seen[-1] == (size, size)
    assert seen == sorted(seen)


def test_a_break_is_gone_on_with(remote, model, tmp_path, monkeypatch):
    monkeypatch.setattr("sylvan.checkpoints.remote._CHUNK", 10_000)
    asked: list[int] = []
    real = type(remote).cat_file

    def breaking(self, path, start=None, end=None, **kwargs):
        if path.endswith("model.safetensors"):
            asked.append(start)
            if len(asked) == 4:
                raise ConnectionError("the line went down")
        return real(self, path, start=start, end=end, **kwargs)

    monkeypatch.setattr(type(remote), "cat_file", breaking)
    with pytest.raises(ConfigError, match="the line went down"):
        fetch(URL, tmp_path)
    (folder,) = tmp_path.iterdir()
    assert not (folder / "model.safetensors").exists()

    assert same(fetch(URL, tmp_path), model)
    assert asked[:4] == [0, 10_000, 20_000, 30_000]
    assert asked[4] == 30_000


def test_what_changed_meanwhile_is_not_joined(remote, model, tmp_path, monkeypatch):
    real = type(remote).cat_file
    monkeypatch.setattr("sylvan.checkpoints.remote._CHUNK", 10_000)

    def breaking(self, path, start=None, end=None, **kwargs):
        if path.endswith("model.safetensors") and start:
            raise ConnectionError("gone")
        return real(self, path, start=start, end=end, **kwargs)

    monkeypatch.setattr(type(remote), "cat_file", breaking)
    with pytest.raises(ConfigError, match="gone"):
        fetch(URL, tmp_path)
    monkeypatch.undo()
    data = bytes(reversed((model / "model.safetensors").read_bytes()))
    remote.pipe_file(f"{ROOT}/model.safetensors", data)

    assert (fetch(URL, tmp_path) / "model.safetensors").read_bytes() == data


def test_a_short_answer_is_refused(remote, tmp_path, monkeypatch):
    monkeypatch.setattr(type(remote), "cat_file", lambda *_, **__: b"")

    with pytest.raises(ConfigError, match="came with 0 bytes instead of"):
        fetch(URL, tmp_path)


def test_file_urls_work(model, tmp_path):
    assert same(fetch(f"file://{model}", tmp_path), model)


class Quiet(http.server.SimpleHTTPRequestHandler):
    lists = True

    def log_message(self, *args: object) -> None:
        """Say nothing."""

    def list_directory(self, path):
        if self.lists:
            return super().list_directory(path)
        self.send_error(404)
        return None


class Unlisted(Quiet):
    lists = False


@pytest.mark.parametrize("handler", [Quiet, Unlisted])
def test_a_web_server_is_enough(model, tmp_path, handler):
    pytest.importorskip("aiohttp")
    serve = functools.partial(handler, directory=str(model.parent))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), serve) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            folder = fetch(f"http://127.0.0.1:{server.server_port}/tiny", tmp_path)
        finally:
            server.shutdown()
            thread.join()

    ours, theirs = contents(folder), contents(model)
    assert ours["model.safetensors"] == theirs["model.safetensors"]
    assert ours["tokenizer.json"] == theirs["tokenizer.json"]


def test_only_what_is_needed_is_fetched():
    names = ["config.json", "model.safetensors", "pytorch_model.bin", "tokenizer.json", "code.py"]
    names += ["onnx/model.onnx", "original/params.json", "1_Pooling/config.json"]

    assert set(chosen(names)) == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "1_Pooling/config.json",
    }
    assert set(chosen(["config.json", "pytorch_model.bin"])) == {"config.json", "pytorch_model.bin"}
    assert chosen(["m.gguf", "README.md"]) == ["m.gguf"]


@pytest.mark.parametrize("name", ["1_x/../../evil.json", "..\\evil.json"])
def test_names_that_lead_elsewhere_are_refused(name):
    with pytest.raises(ConfigError, match="points outside"):
        chosen(["config.json", name])


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("memory://nowhere", "no config.json"),
        ("odd-thing://x/y", "Protocol not known"),
        ("file:///nowhere/at/all", "nowhere/at/all"),
    ],
)
def test_what_cannot_be_had_is_one_sentence(url, words, tmp_path):
    with pytest.raises(ConfigError, match=words) as error:
        fetch(url, tmp_path)
    assert url in str(error.value)
    assert "\n" not in str(error.value)


def test_passwords_are_not_shown(tmp_path):
    with pytest.raises(ConfigError) as error:
        fetch("odd-thing://me:secret@host/x", tmp_path)

    assert "secret" not in str(error.value)


def test_the_package_is_named_where_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)

    with pytest.raises(ConfigError, match=r"pip install 'sylvan\[remote\]'"):
        fetch(URL, tmp_path)


def test_urls_differ_from_paths():
    assert is_remote("s3://bucket/model")
    assert is_remote("simplecache::https://host/model")
    assert not is_remote("C:\\models\\x")
    assert not is_remote("models/x")


def test_check_shows_where_the_copy_is(remote, cache, capsys):
    main(["check", "model", URL, "--json", "--device", "cpu"])
    out = capsys.readouterr()

    found = {row["what"]: row for row in json.loads(out.out)}
    assert found["directory"]["detail"].startswith(str(cache))
    assert found["weights"]["status"] == "ok"
    assert f"fetching {URL}" in out.err
