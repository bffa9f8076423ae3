"""`sylvan check`: what this machine or a model directory supports, and what is missing."""

from __future__ import annotations

import importlib.metadata
import json
import platform
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from sylvan.cli.check_model import check_model
from sylvan.cli.finding import Finding
from sylvan.cli.listen import free_port
from sylvan.cli.main import DONE, FAILED, Spec
from sylvan.cli.settings import load_settings
from sylvan.config.fields import size_text
from sylvan.config.flags import Option, Parsed
from sylvan.config.tree import ServerConfig
from sylvan.protocol.errors import ConfigError
from sylvan.utils.machine import Machine, inspect_machine

SPEC = Spec(
    usage="check [model MODEL | kernels] [flags]",
    doc="Check this machine, or how a model (a directory, a GGUF file or a URL) would be served "
    "here. The exit code is 1 if something needed for serving is missing.",
    options=(
        Option("json", "Print one JSON object per finding, in a list."),
        Option("program", "Load the model and list the ops of its step program, with their bytes."),
    ),
    max_positions=2,
)

_MARKS = {"ok": "ok     ", "slow": "slower ", "missing": "MISSING"}
_MIN_BYTES = 1 << 30


def run(args: Parsed) -> int:
    return report(list(_findings(args)), as_json=args.has("json"))


def report(findings: Sequence[Finding], *, as_json: bool) -> int:
    """Print findings; return the exit code: 1 if something needed for serving is missing."""
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            print(f"{_MARKS[finding.status]}  {finding.what:14} {finding.detail}".rstrip())
            if finding.status != "ok" and finding.cost:
                print(f"{'':25}{finding.cost}")
    return FAILED if any(finding.status == "missing" for finding in findings) else DONE


def _findings(args: Parsed) -> Iterable[Finding]:
    words = args.positions
    if not words:
        server = load_settings(args, position=None).config.server
        return check_machine(inspect_machine(), server)
    if words[0] == "model" and len(words) > 1:
        return check_model(words[1], args)
    if words == ["kernels"]:
        return check_kernels()
    raise ConfigError(f"unexpected argument {words[0]!r}; usage: sylvan {SPEC.usage}")


def check_kernels() -> Iterable[Finding]:
    """Check which compiled libraries exist, and which kernels are used; say why."""
    from sylvan import kernels  # inspects the built libraries
    from sylvan.kernels.inventory import op_uses
    from sylvan.runtime.platform.find import load_kinds

    found = kernels.describe()
    if found.variant is None:
        detail = "degraded: PyTorch computes what native kernels would"
        yield Finding("slow", "kernels", detail, found.reasons["none"])
    else:
        for line in found.lines:
            name, _, text = line.partition(": ")
            yield Finding("ok", name, text)
    kinds = load_kinds().items()
    devices = {n: k.facts.device_type for n, k in kinds if n != "cpu" and not k.problem()}
    for use in op_uses(found, devices):
        cost = "several times slower" if use.degraded else ""
        yield Finding("slow" if use.degraded else "ok", use.name, use.detail, cost)


def check_machine(machine: Machine, server: ServerConfig) -> Iterable[Finding]:
    """Check what a server needs, and what makes it fast."""
    yield Finding("ok", "Python", platform.python_version())
    yield _torch()
    yield Finding("ok", "CPU", f"{machine.cpu_name}, {machine.cores} cores usable")
    yield from _instructions(machine)
    yield _compiler()
    yield _memory(machine)
    yield _port(server)
    yield from _libraries()
    yield from check_devices()


def check_devices() -> Iterable[Finding]:
    """Features by kind of device, this machine's devices first; for others the missing parts."""
    from sylvan.runtime.engine.chips import chip_rows  # the rules of configurations

    rows = chip_rows()
    for row in sorted(rows, key=lambda row: bool(row.missing)):
        name = f"device {row.name}"
        if row.missing:
            needs = f" ({row.how})" if row.how else ""
            yield Finding("ok", name, f"not here: {row.missing}{needs}")
        else:
            cells = (f"{column}: {cell or 'none'}" for column, cell in row.cells.items())
            yield Finding("ok", name, f"{row.state}; {'; '.join(cells)}")


def _instructions(machine: Machine) -> Iterable[Finding]:
    wanted = {
        "avx2": "kernels fall back to portable code, several times slower",
        "avx512f": "kernels use 256-bit registers, up to two times slower",
        "avx512_bf16": "bfloat16 models run in float32: twice the memory, and slower prefill",
        "avx512_vnni": "8-bit models are computed without VNNI, slower",
    }
    if platform.machine().lower() not in ("x86_64", "amd64"):
        return
    for name, cost in wanted.items():
        there = name in machine.features
        if name == "avx512_vnni":
            there |= "avx_vnni" in machine.features  # half the vector width, like its registers
        yield Finding("ok" if there else "slow", name, "" if there else "not there", cost)


def _torch() -> Finding:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return Finding("missing", "torch", "not installed", "no model can be served: install torch")
    build = "CPU build" if version.endswith("+cpu") else "build for GPUs, or of unknown kind"
    return Finding("ok", "torch", f"{version} ({build})")


def _compiler() -> Finding:
    found = next((path for name in ("g++", "clang++", "c++") if (path := shutil.which(name))), "")
    cost = "native kernels cannot be built; models run on plain torch, several times slower"
    return Finding("ok" if found else "slow", "C++ compiler", found or "none found", cost)


def _memory(machine: Machine) -> Finding:
    free = f"{size_text(machine.available_bytes)} free of {size_text(machine.total_bytes)}"
    low = machine.available_bytes < _MIN_BYTES
    return Finding("slow" if low else "ok", "memory", free, "only very small models fit")


def _port(server: ServerConfig) -> Finding:
    port = server.port
    if port == 0 or free_port(server.host, port - 1) == port:
        return Finding("ok", "port", f"{port} is free")
    return Finding("slow", "port", f"{port} is taken", f"--port {free_port(server.host, port)}")


def _libraries() -> Iterable[Finding]:
    optional = {
        "triton": "needed for GPUs only: pip install 'sylvan[gpu]'",
        "gguf": "GGUF files are refused: pip install 'sylvan[gguf]'",
        "transformers": "other tokenizers are refused: pip install 'sylvan[transformers]'",
    }
    for name, cost in optional.items():
        try:
            yield Finding("ok", name, importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            yield Finding("slow", name, "not installed", cost)
