"""Tours with the packages that people use, against real servers: of the built-in model, of an
encoder with random weights, which makes embeddings, and of the built-in model with a stretched
context for agents, whose prompts are longer than it was made for.

`make sdk` runs the quick ones, `make sdk-all` all of them; `python tests/sdk/run.py openai2 npm`
some. Packages are installed under `build/sdk` by name, below the next version that may break.
Without a package index tours are left out, loudly, and nothing fails.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parents[1]))

from tests.support.encoder import write_bert  # noqa: E402 - of the checkout, which is no package

BUILD = HERE.parents[1] / "build" / "sdk"
ATTEMPTS = 3
PAUSE_S = 5
INSTALL_S = 600
TOUR_S = 600
START_S = 180


@dataclass(frozen=True)
class Kit:
    """Packages that are installed together, and the tours that need them."""

    name: str
    packages: tuple[str, ...]
    tours: tuple[str, ...]
    quick: bool = False  # in `make sdk`
    scripts: bool = False  # npm: what the packages want to run when they are installed
    beside: bool = False  # without their dependencies, beside those of this checkout
    flags: tuple[str, ...] = ()  # of a server of its own

    @property
    def is_npm(self) -> bool:
        return self.tours[0].endswith(".mjs")

    @property
    def home(self) -> Path:
        return BUILD / self.name

    def command(self, tour: str, urls: Sequence[str]) -> list[str]:
        if self.is_npm:
            return ["node", str(self.home / tour), *urls]
        python = sys.executable if self.beside else str(self.home / "bin" / "python")
        return [python, str(HERE / tour), *urls]

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "PYTHONPATH": str(self.home)} if self.beside else dict(os.environ)


KITS = (
    Kit("openai2", ("openai>=2,<3",), ("tour_openai.py",), quick=True),
    Kit("openai3", ("openai>=3,<4",), ("tour_openai.py",), quick=True),
    Kit(
        "clients",
        # litellm imports mcp whenever tools are given, but does not ask for it
        ("anthropic>=2,<3", "ollama<1", "litellm<1.107", "mcp", "langchain-openai>=1,<2"),
        ("tour_anthropic.py", "tour_ollama.py", "tour_litellm.py", "tour_langchain.py"),
        quick=True,
    ),
    Kit(
        "npm",
        ("openai@7", "@anthropic-ai/sdk@1"),
        ("tour_openai.mjs", "tour_anthropic.mjs"),
        quick=True,
    ),
    Kit(
        "ai",
        ("ai@6", "@ai-sdk/openai-compatible@2", "@ai-sdk/openai@3", "@ai-sdk/anthropic@3"),
        ("tour_ai.mjs",),
    ),
    Kit("ollama", ("ollama@0",), ("tour_ollama.mjs",)),
    Kit(
        "langchain",
        ("langchain-anthropic>=1,<2", "langchain-ollama>=1,<2"),
        ("tour_langchain_vendors.py",),
    ),
    Kit(
        "llamaindex",
        ("llama-index-core<0.15", "llama-index-llms-openai-like<1"),
        ("tour_llamaindex.py",),
    ),
    Kit(
        "structured",
        ("instructor[anthropic]>=1,<2", "outlines[openai]>=1,<2", "guidance<0.4", "openai>=3,<4"),
        ("tour_structured.py",),
    ),
    Kit(
        "agents",
        ("pydantic-ai-slim[openai,anthropic]>=2,<3", "openai-agents<0.25", "smolagents[openai]<2"),
        ("tour_agents.py",),
    ),
    Kit("dspy", ("dspy>=3,<4",), ("tour_dspy.py",)),
    Kit("haystack", ("haystack-ai>=3,<4",), ("tour_haystack.py",)),
    Kit("kernel", ("semantic-kernel>=1,<2",), ("tour_kernel.py",)),
    Kit("codex", ("@openai/codex",), ("tour_codex.mjs",), quick=True),
    Kit("claude", ("@anthropic-ai/claude-code@2",), ("tour_claude.mjs",), scripts=True),
    Kit("opencode", ("opencode-ai@1",), ("tour_opencode.mjs",), scripts=True),
    Kit("aider", ("aider-chat<0.87",), ("tour_aider.py",)),
    Kit(
        "phoenix",
        ("arize-phoenix<21",),
        ("tour_phoenix.py",),
        flags=("--enable-trace", "--otlp-traces-endpoint", "http://127.0.0.1:16006/v1/traces"),
    ),
    Kit("continue", ("@continuedev/cli@1",), ("tour_continue.mjs",)),
    Kit(
        "sglang",
        (
            *("sglang==0.5.23", "pybase64", "ipython", "traitlets", "datasets", "multiprocess"),
            *("pandas", "pyarrow", "dill", "xxhash"),
        ),
        ("tour_sglang.py",),
        beside=True,
    ),
    Kit(
        "lmeval",
        (
            *("lm_eval<0.5", "tenacity", "evaluate", "datasets", "sacrebleu", "rouge_score"),
            *("sqlitedict", "word2number", "more_itertools", "jsonlines", "pytablewriter"),
        ),
        ("tour_lm_eval.py",),
        beside=True,
        flags=("--dtype", "float32"),
    ),
)


def main(names: Sequence[str]) -> int:
    """Install, serve, tour; 1 if a tour failed."""
    every = names == ["all"]
    kits = [kit for kit in KITS if every or (kit.name in names if names else kit.quick)]
    with ThreadPoolExecutor(2) as pool:
        reasons = list(pool.map(install, kits))
    ready = [kit for kit, reason in zip(kits, reasons, strict=True) if reason is None]
    failed: list[str] = []
    if ready:
        with tempfile.TemporaryDirectory() as folder:
            encoder = write_bert(Path(folder) / "tiny-bert")
            agent = write_long(Path(folder) / "sapling")
            with (
                serving("sapling") as model,
                serving(str(encoder)) as embedder,
                serving(str(agent)) as long,
            ):
                urls = model, embedder, long
                failed = [
                    f"{kit.name}/{tour}"
                    for kit in ready
                    for tour in kit.tours
                    if not toured(kit, tour, urls)
                ]
    for kit, reason in zip(kits, reasons, strict=True):
        if reason is not None:
            print(f"\n*** SKIPPED {kit.name}: it could not be installed ***\n{reason}")
    print(f"\n{'FAILED: ' + ', '.join(failed) if failed else 'all tours that ran went well'}")
    return 1 if failed else 0


def toured(kit: Kit, tour: str, urls: Sequence[str]) -> bool:
    """Run one tour, perhaps with a server of its own; whether it went well."""
    if not kit.flags:
        return go(kit, tour, urls)
    with serving("sapling", kit.flags) as url:
        return go(kit, tour, (url,))


def write_long(folder: Path) -> Path:
    """The built-in model with 16 times its context, by YaRN: agents begin with 35,000 tokens."""
    shutil.copytree(HERE.parents[1] / "src" / "sylvan" / "assets" / "sapling", folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    length = config["max_position_embeddings"]
    config["max_position_embeddings"] = 16 * length
    config["rope_scaling"] = {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": length,
    }
    file.write_text(json.dumps(config))
    return folder


def install(kit: Kit) -> str | None:
    """Have the packages; returns why that is impossible."""
    done = kit.home / ".installed"
    wanted = " ".join(kit.packages)
    if done.exists() and done.read_text() == wanted:
        return None
    if kit.is_npm and (shutil.which("npm") is None or shutil.which("node") is None):
        return "there is no node"
    reason = ""
    for attempt in range(ATTEMPTS):
        time.sleep(PAUSE_S * attempt)
        try:
            reason = npm(kit) if kit.is_npm else beside(kit) if kit.beside else pip(kit)
        except subprocess.TimeoutExpired:
            reason = f"not done after {INSTALL_S} s"
        if not reason:
            done.write_text(wanted)
            return None
    return reason


def pip(kit: Kit) -> str:
    """Install into a fresh environment; returns what went wrong."""
    steps = [
        [sys.executable, "-m", "venv", "--clear", str(kit.home)],
        [str(kit.home / "bin" / "python"), "-m", "pip", "install", "-q", "--no-compile"],
    ]
    steps[1] += ["--disable-pip-version-check", *kit.packages]
    return "".join(quietly(step) for step in steps)


def beside(kit: Kit) -> str:
    """Install into a folder, for this Python, which has the other half of what is needed."""
    flags = ["-q", "--no-compile", "--no-deps", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *flags, "--target", str(kit.home)]
    shutil.rmtree(kit.home, ignore_errors=True)
    return quietly([*command, *kit.packages])


def npm(kit: Kit) -> str:
    """Install into a folder, beside which the tours are put; returns what went wrong."""
    kit.home.mkdir(parents=True, exist_ok=True)
    flags = ["--no-audit", "--no-fund", "--loglevel", "error"]
    flags += [] if kit.scripts else ["--ignore-scripts"]
    return quietly(["npm", "install", *flags, "--prefix", str(kit.home), *kit.packages])


def quietly(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    return "" if done.returncode == 0 else (done.stdout + done.stderr)[-2000:] or "it failed"


@contextmanager
def serving(model: str, flags: Sequence[str] = ()) -> Iterator[str]:
    """A model on a free port; the server ends when its standard input does."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "sylvan", "serve", model, "--until-eof"]
        command += ["--server.port", "0"]
        command += ["--server.api-key", "secret", "--server.data-dir", folder, *flags]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE.parents[1]
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield found(process.stdout)
        finally:
            process.stdin.close()
            process.stdout.close()
            try:
                process.wait(START_S)
            except subprocess.TimeoutExpired:
                process.kill()


def found(lines: Iterator[str]) -> str:
    """Where the server says it is."""
    seen = ""
    for line in lines:
        seen += line
        if match := re.search(r"serves \S+ at (http://\S+)", line):
            return match[1]
    sys.exit(f"the server did not start:\n{seen}")


def go(kit: Kit, tour: str, urls: Sequence[str]) -> bool:
    """Run one tour; whether it went well."""
    if kit.is_npm:
        for file in HERE.glob("*.mjs"):
            shutil.copy(file, kit.home)
    print(f"\n{kit.name}/{tour}", flush=True)
    try:
        command, given = kit.command(tour, urls), kit.environment
        return subprocess.run(command, timeout=TOUR_S, check=False, env=given).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"not done after {TOUR_S} s")
        return False


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
