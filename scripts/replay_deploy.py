"""Runs the commands of `docs/deploy` that can run on this machine, and shows their output.

    python scripts/replay_deploy.py [PAGE ...]

Each command is read from its page and printed unchanged. Files that it would write outside of the
working tree go into a temporary directory instead (`PLACES`); `sylvan` is the wheel that is built
from this tree. Servers get one request when they are ready, and are stopped by SIGTERM. A command
whose program or service is missing here is listed with the reason.

At the end comes a table of the commands that ran with their times, and the sizes of the wheel and
of the installation. The exit code is 1 if a command failed.
"""

from __future__ import annotations

import argparse
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs/deploy"
PATIENCE_S = 120.0
SYSTEMD = Path("/run/systemd/system")
"""Is there if systemd is the first process."""
_FENCE = re.compile(r"^```bash\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"^    ((?:make|CXX=).*)$", re.MULTILINE)
_NEEDS = ("docker", "helm", "kubectl", "systemctl", "journalctl", "make")


@dataclass(slots=True)
class Replay:
    """One run: replaced places, and results of the commands.

    Attributes:
        folder: Temporary directory.
        port: Port of servers.
        wheel: Wheel of this tree.
        counts: Commands that ran, failed, and could not run.
        times: Page, command and duration of the commands that ran.
    """

    folder: Path
    port: int
    wheel: Path
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("ran", "failed", "left"), 0)
    )
    times: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    _server: subprocess.Popen[bytes] | None = None

    def page(self, path: Path) -> None:
        """Run the commands of a page, in order."""
        print(f"\n== {path.relative_to(ROOT)}", flush=True)
        for command in commands(path.read_text()):
            print(f"$ {command}", flush=True)
            if why := self.obstacle(command):
                self.counts["left"] += 1
                print(f"  (not run: {why})")
            else:
                self.counts["ran"] += 1
                begun = time.monotonic()
                good = self.run(command)
                self.counts["failed"] += not good
                took = f"{time.monotonic() - begun:.1f} s{'' if good else ', failed'}"
                self.times.append((path.stem, command, took))
        self.stop()

    def table(self) -> Iterator[str]:
        """Times and sizes, as Markdown."""
        yield "| page | command | took |\n|---|---|---|"
        for page, command, took in self.times:
            shown = command if len(command) <= 100 else f"{command[:97]}..."
            yield f"| {page} | `{shown.replace('|', chr(92) + '|')}` | {took} |"
        yield "\n| what | size |\n|---|---|"
        yield f"| {self.wheel.name} | {self.wheel.stat().st_size / 1e6:.1f} MB |"
        if (installed := self.folder / "sylvan").exists():
            files = [f.lstat().st_size for f in installed.rglob("*") if not f.is_dir()]
            yield f"| the environment, PyTorch included | {sum(files) / 1e9:.2f} GB |"

    def obstacle(self, command: str) -> str:
        """Return why a command cannot run here; empty: it can."""
        programs = {word for word in re.findall(r"[\w./~-]+", command) if word in _NEEDS}
        missing = sorted(name for name in programs if shutil.which(name) is None)
        found = {
            "targets of the Makefile are run by CI itself": "make" in programs,
            f"there is no {' '.join(missing[:1])}": bool(missing),
            "there is no cluster": bool({"kubectl", "helm"} & programs),
            "there is no journal": "journalctl" in programs and not SYSTEMD.exists(),
            "no container daemon runs": "docker" in programs and not _succeeds("docker", "info"),
            "what it asks is not there": ":30000" in command and self._server is None,
        }
        return next((why for why, holds in found.items() if holds), "")

    def run(self, command: str) -> bool:
        """Run one command; whether it succeeded."""
        if "systemctl" in command and not SYSTEMD.exists():
            print("  (systemd is not the first process: ExecStart of the unit is run by hand)")
            unit = (self.folder / "etc/systemd/system/sylvan.service").read_text()
            command = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)[0]
        if " serve" in command:
            self.stop()
            return self.serve(self.placed(command))
        begun = time.monotonic()
        done = subprocess.run(
            self._bash(self.placed(command)),
            cwd=ROOT,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=20 * PATIENCE_S,
            check=False,
        )
        for line in done.stdout.splitlines()[-12:]:
            print(f"  {line[:200]}")
        how = "done" if done.returncode == 0 else f"exit code {done.returncode}"
        print(f"  ({how} after {time.monotonic() - begun:.1f} s)", flush=True)
        return done.returncode == 0

    def _bash(self, script: str) -> list[str]:
        variables = {
            "ADMIN": "admin-key",
            "SYLVAN_SERVER__ADMIN_API_KEY": "admin-key",
            "SYLVAN_SERVER__PORT": str(self.port),
        }
        exports = "".join(f"export {name}={value}; " for name, value in variables.items())
        path = f"export PATH={shlex.quote(str(self.folder / 'sylvan/bin'))}:$PATH; "
        return ["bash", "-o", "pipefail", "-c", exports + path + script]

    def placed(self, command: str) -> str:
        """Replace places in a command: of files, of the port, of the package itself."""
        places = {
            "~/sylvan": str(self.folder / "sylvan"),
            "/opt/sylvan": str(self.folder / "sylvan"),
            "/etc/": f"{self.folder}/etc/",
            "localhost:30000": f"127.0.0.1:{self.port}",
            "127.0.0.1:30000": f"127.0.0.1:{self.port}",
            "MODEL ": "sapling ",
            "llm.example.com": "llm.example.com,127.0.0.1",
            " --index-url https://download.pytorch.org/whl/cpu": "",
            " ...": " -H 'Authorization: Bearer admin-key' -H 'Content-Type: application/json'",
        }
        for old, new in places.items():
            command = command.replace(old, new)
        command = re.sub(r"(pip install (?:torch\S+ )?)sylvan\b", rf"\1{self.wheel}", command)
        if "PATCH" in command and "-d" not in command:
            command += """ -d '{"limits": {"samples": 64}}'"""
        return command.replace("curl ", "curl -sS --fail-with-body ")

    def serve(self, script: str) -> bool:
        """Start a server and wait until it is ready; return whether it became ready."""
        begun = time.monotonic()
        self._server = subprocess.Popen(
            self._bash(f"exec {script}"),
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while time.monotonic() < begun + PATIENCE_S and self._server.poll() is None:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ready", timeout=5):
                    print(f"  (ready after {time.monotonic() - begun:.1f} s)", flush=True)
                    return True
            except OSError:
                time.sleep(0.1)
        print("  (it did not get ready)")
        return False

    def stop(self) -> None:
        """Stop the server, if one runs."""
        if self._server is not None:
            self._server.send_signal(signal.SIGTERM)
            print(f"  (SIGTERM: ended with {self._server.wait(PATIENCE_S)})", flush=True)
            self._server = None


def _succeeds(*command: str) -> bool:
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def commands(text: str) -> Iterator[str]:
    """Return the commands of a page, in order; lines continued by a backslash are one command."""
    found = [(m.start(), m[1]) for m in (*_FENCE.finditer(text), *_INDENTED.finditer(text))]
    for _, block in sorted(found):
        for line in block.replace("\\\n", " ").splitlines():
            command = re.split(r"\s{2,}# |\s{4,}# ", line)[0].strip()
            if command and not command.startswith("#"):
                yield re.sub(r"\s{2,}", " ", command)


def main() -> int:
    """Replay the pages; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="*", help="names of pages; all")
    parser.add_argument("--wheel", type=Path, help="default: one is built from this tree")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
        sock.close()
        folder = Path(name)
        wheel = args.wheel.resolve() if args.wheel else build(folder)
        replay = Replay(folder, port, wheel)
        order = ("packages", "services", "proxies", "images", "kubernetes")
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(124))  # as of `timeout`
        try:
            for page in args.pages or order:
                replay.page(PAGES / f"{page}.md")
        finally:
            replay.stop()
            print("\n== sizes and times\n", *replay.table(), sep="\n")
            print(f"\n{replay.counts}", flush=True)
    return 1 if replay.counts["failed"] else 0


def build(folder: Path) -> Path:
    """Build the wheel of this tree."""
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", str(folder), "."]
    subprocess.run(command, cwd=ROOT, check=True)
    return next(folder.glob("sylvan-*.whl"))


if __name__ == "__main__":
    sys.exit(main())
