"""Starts a server for one command, on a private socket; it exits with this process."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from sylvan.cli.client import ApiClient, ServerError, over_socket
from sylvan.cli.progress import loading
from sylvan.cli.settings import load_settings, resolve_settings
from sylvan.config.env import runtime_dir, without_settings
from sylvan.config.flags import Parsed
from sylvan.config.load import dump
from sylvan.protocol.errors import ConfigError

_POLL_S = 0.05
_STOP_S = 10.0


@contextmanager
def connect(args: Parsed, *, position: str | None) -> Iterator[ApiClient]:
    """Return a client of the server at `--url`, or of one started with the given settings.

    Args:
        args: The command line.
        position: Path of the setting that the first positional argument sets, if any.

    Raises:
        ConfigError: The settings conflict, or are given together with `--url`.
        ServerError: The server did not start.
    """
    url = args.options.get("url")
    if url is not None:
        spelled = [s.spelled for s in args.given.settings]
        spelled += args.positions if position else []
        if spelled:
            raise ConfigError(f"--url: that server has its own settings; leave out {spelled[0]}")
        with ApiClient(url, api_key=args.options.get("key")) as client:
            yield client
        return
    for setting in args.given.settings:
        if setting.path.startswith("server."):
            raise ConfigError(
                f"{setting.spelled}: not for a server that this command starts; use --url"
            )
    loaded = load_settings(args, position=position)
    resolve_settings(loaded)  # fail here, where the flags were given
    tree = dump(loaded.config, defaults=False)
    tree.pop("server", None)
    with (
        tempfile.TemporaryDirectory(prefix="sylvan-", dir=runtime_dir()) as folder,
        _server(Path(folder), tree) as socket_path,
        over_socket(socket_path) as client,
    ):
        yield client


@contextmanager
def _server(folder: Path, tree: Mapping[str, object]) -> Iterator[Path]:
    socket_path, config, log = folder / "http", folder / "config.json", folder / "log"
    config.write_text(json.dumps(tree))
    command = [sys.executable, "-m", "sylvan", "serve", "--quiet", "--until-eof"]
    command += ["--config", str(config), "--server.uds", str(socket_path)]
    with (
        log.open("wb") as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=without_settings(),
            start_new_session=True,  # Ctrl-C stops an answer, not the server
        ) as process,
    ):
        try:
            with loading("starting the model"):
                _wait_ready(process, socket_path, log)
            yield socket_path
        finally:
            _stop(process)


def _wait_ready(process: subprocess.Popen[bytes], socket_path: Path, log: Path) -> None:
    with over_socket(socket_path) as client:
        while not client.is_ready():
            try:
                process.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                continue
            text = log.read_text(errors="replace").strip() or f"exit code {process.returncode}"
            raise ServerError(f"the server did not start:\n{text}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None, "opened with a pipe"
    process.stdin.close()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
