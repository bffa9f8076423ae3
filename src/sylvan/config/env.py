"""The only reader of the process environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sylvan.config.fields import nearest
from sylvan.config.load import Setting
from sylvan.config.schema import BENCH, ROUTE, SERVE, SIMULATE, Schema
from sylvan.protocol.errors import ConfigError

PREFIX = "SYLVAN_"
CONFIG_VARIABLE = "SYLVAN_CONFIG"
PRESET_VARIABLE = "SYLVAN_PRESET"
_OTHERS = (ROUTE.prefix, BENCH.prefix, SIMULATE.prefix)
KEY_VARIABLES = ("OPENAI_API_KEY", "API_KEY")


def read(environ: Mapping[str, str] | None = None, schema: Schema[Any] = SERVE) -> list[Setting]:
    """Settings from variables such as `SYLVAN_CACHE__PAGE_SIZE`.

    Args:
        environ: Replaces this process's environment.
        schema: Schema of the settings; variables of other schemas are ignored.

    Raises:
        ConfigError: a variable with our prefix matches no field.
    """
    known = {schema.variable(path): path for path in (*schema.fields, *schema.sections) if path}
    settings: list[Setting] = []
    unknown: list[str] = []
    for name, value in (os.environ if environ is None else environ).items():
        if not name.startswith(schema.prefix) or name in (CONFIG_VARIABLE, PRESET_VARIABLE):
            continue
        if schema is SERVE and name.startswith(_OTHERS):
            continue
        if name in known:
            settings.append(Setting(known[name], value, "environment", name))
        else:
            unknown.append(f"{name}: no such setting{nearest(name, known)}")
    if unknown:
        raise ConfigError("\n".join(unknown))
    return settings


def torchrun_settings(environ: Mapping[str, str] | None = None) -> list[Setting]:
    """Settings for several machines, from the variables that `torchrun` sets on each.

    The port is the one after `MASTER_PORT`, which torchrun's own store may use.

    Args:
        environ: Replaces this process's environment.

    Raises:
        ConfigError: torchrun starts several processes per machine.
    """
    found = os.environ if environ is None else environ
    if "TORCHELASTIC_RUN_ID" not in found:
        return []
    if found.get("LOCAL_WORLD_SIZE", "1") != "1":
        raise ConfigError(
            f"torchrun starts {found['LOCAL_WORLD_SIZE']} processes on this machine, and each "
            "would start all of its ranks; use torchrun --nproc-per-node 1, and sylvan --tp"
        )
    nodes = found.get("GROUP_WORLD_SIZE", "1")
    if nodes == "1":
        return []
    port = found.get("MASTER_PORT", "")
    address = f"{found.get('MASTER_ADDR', '')}:{int(port) + 1 if port.isdecimal() else port}"
    given = (
        ("parallel.nodes", nodes, "GROUP_WORLD_SIZE"),
        ("parallel.node_rank", found.get("GROUP_RANK", "0"), "GROUP_RANK"),
        ("parallel.address", address, "MASTER_ADDR"),
    )
    return [Setting(path, value, "environment", name) for path, value, name in given]


def config_file(environ: Mapping[str, str] | None = None) -> str | None:
    """Configuration file named by `SYLVAN_CONFIG`."""
    return (os.environ if environ is None else environ).get(CONFIG_VARIABLE)


def client_key(environ: Mapping[str, str] | None = None) -> str | None:
    """Key for the server that a client calls, from the variables of OpenAI clients."""
    found = os.environ if environ is None else environ
    return next((found[name] for name in KEY_VARIABLES if found.get(name)), None)


def preset(environ: Mapping[str, str] | None = None) -> str | None:
    """Preset named by `SYLVAN_PRESET`."""
    return (os.environ if environ is None else environ).get(PRESET_VARIABLE)


def without_settings() -> dict[str, str]:
    """This process's environment without our variables, for a child configured by a file."""
    return {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}


def for_compute() -> dict[str, str]:
    """This process's environment for a child that computes.

    Omits our variables, including keys: such a child is configured by messages. Idle PyTorch
    threads sleep, because our threads share their cores, unless the user set `OMP_WAIT_POLICY`.
    """
    return {"OMP_WAIT_POLICY": "PASSIVE", **without_settings()}


def calm_threads() -> None:
    """Let idle PyTorch threads of this process sleep; must run before PyTorch is imported."""
    os.environ.update(for_compute())


def threads_are_calm() -> bool:
    """Whether idle PyTorch threads sleep, as far as can be determined."""
    return os.environ.get("OMP_WAIT_POLICY", "").upper() == "PASSIVE"


def cache_dir() -> Path:
    """Directory for files that can be regenerated; not created here."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "sylvan"


def runtime_dir() -> Path:
    """Parent for private directories with sockets: short, and on a local file system."""
    return Path(os.environ.get("XDG_RUNTIME_DIR") or os.environ.get("TMPDIR") or "/tmp")


def variable(name: str) -> str | None:
    """A variable that belongs to another program's settings, such as a provider's key."""
    return os.environ.get(name)


def given_sockets(environ: Mapping[str, str] | None = None) -> range:
    """File descriptors of the sockets that a service manager opened for this process.

    Args:
        environ: Replaces this process's environment.
    """
    found = os.environ if environ is None else environ
    count, owner = found.get("LISTEN_FDS", ""), found.get("LISTEN_PID", "")
    mine = count.isdecimal() and owner == str(os.getpid())
    return range(3, 3 + int(count)) if mine else range(0)


def notify_address(environ: Mapping[str, str] | None = None) -> str | None:
    """Socket on which a service manager waits for the state of this process."""
    return (os.environ if environ is None else environ).get("NOTIFY_SOCKET")
