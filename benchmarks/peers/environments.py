"""Runs each peer in its own environment and processes, with a time limit."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import FrameType

from peers import Peer

HERE = Path(__file__).parent
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "DO_NOT_TRACK": "1",
}
_COMPLAINT = re.compile(r"\b(?:\w*(?:Error|Exception|Interrupt)|ERROR|error|fatal)\b")


class CommandFailedError(Exception):
    """A command failed or took too long; `printed` is its output so far."""

    def __init__(self, reason: str, printed: str = "") -> None:
        super().__init__(reason)
        self.printed = printed


class Environment:
    """The Python of a peer: a virtual environment that also sees the packages installed here.

    So PyTorch is installed only once, and no peer can change the packages that Sylvan uses. Logs go
    to `cache`/logs.
    """

    def __init__(self, name: str, peer: Peer, cache: Path, threads: int = 1) -> None:
        self._folder, self._peer, self._threads = cache / "envs" / name, peer, threads
        self._log = cache / "logs" / f"{name}.log"
        self.python = self._folder / "bin" / "python" if peer.packages else Path(sys.executable)

    def prepare(self, limit_s: float) -> None:
        """Install the packages, unless they are already installed. Raises `CommandFailedError`."""
        done = self._folder / ".done"
        wanted = "\n".join((*self._peer.packages, *(f"not {name}" for name in self._peer.unwanted)))
        if not self._peer.packages or (done.exists() and done.read_text() == wanted):
            return
        run([sys.executable, "-m", "venv", str(self._folder)], limit_s, self._log)
        site = self._folder / "lib" / f"python{sysconfig.get_python_version()}" / "site-packages"
        (site / "host.pth").write_text(sysconfig.get_path("purelib") + "\n")
        pip = [str(self.python), "-m", "pip", "--disable-pip-version-check"]
        pinned = f"torch=={version('torch')}"  # another one would bring gigabytes of CUDA
        install = [*pip, "install", "--progress-bar", "off", "--no-input", pinned]
        extra = dict(self._peer.build_environment)
        run([*install, *self._peer.packages], limit_s, self._log, extra)
        if self._peer.unwanted:
            run([*pip, "uninstall", "-y", *self._peer.unwanted], limit_s, self._log)
        done.write_text(wanted)

    def work(self, *words: str, limit_s: float, script: str = "worker.py") -> str:
        """Run a worker; return its output. Raises `CommandFailedError` with the output."""
        command = [str(self.python), str(HERE / script), *words]
        started = self._peer.start_environment
        extra = OFFLINE | (started(self._folder, self._threads) if started else {})
        return run(command, limit_s, self._log, extra)


def run(
    command: Sequence[str], limit_s: float, log: Path, extra: Mapping[str, str] | None = None
) -> str:
    """Run `command` and return its output; its error output is appended to `log`.

    Processes that it started end with it. Raises `CommandFailedError`.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    # A file instead of a pipe: processes that a command leaves behind may keep a pipe open.
    with (
        log.open("a", encoding="utf-8") as complaints,
        tempfile.TemporaryFile("w+", errors="replace") as said,
    ):
        complaints.write(f"$ {' '.join(command)}\n")
        complaints.flush()
        start = complaints.tell()
        try:
            process = subprocess.Popen(
                command,
                stdout=said,
                stderr=complaints,
                start_new_session=True,
                env={**os.environ, **(extra or {})},
            )
        except OSError as why:
            raise CommandFailedError(f"cannot be started: {why}") from why
        in_time = True
        try:
            process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            in_time = False
        finally:
            _end_group(process.pid)
            process.wait()
        said.seek(0)
        printed = said.read()
    if not in_time:
        raise CommandFailedError(f"took longer than {limit_s:,.0f} s", printed)
    if process.returncode:
        raise CommandFailedError(_reason(process.returncode, log, start, printed), printed)
    return printed


def end_with_processes() -> None:
    """Let SIGTERM interrupt like Ctrl-C, so that the processes that `run` started end, too."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def _end_group(leader: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)


def _reason(code: int, log: Path, start: int, printed: str) -> str:
    """Return the last complaint of a failed command, in one line."""
    if code < 0:
        name = signal.Signals(-code).name
        return f"ended by {name}{', perhaps for lack of memory' if name == 'SIGKILL' else ''}"
    with log.open("rb") as complaints:
        complaints.seek(start)
        said = complaints.read().decode("utf-8", "replace")
    lines = [line.strip() for line in (said.strip() or printed).splitlines() if line.strip()]
    telling = [line for line in lines if _COMPLAINT.search(line)] or lines or ["no output"]
    return f"exit code {code}: {telling[-1][:200]}"
