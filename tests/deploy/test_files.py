"""Files for images, services and platforms: they say what Sylvan and their programs understand."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from sylvan.cli.route import load_route
from sylvan.cli.serve import SPEC as SERVE_SPEC
from sylvan.cli.settings import load_settings
from sylvan.config import env
from sylvan.config.flags import CONFIG_OPTIONS, parse_flags
from sylvan.config.schema import ROUTE, SERVE

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
LOCKED = sorted((DEPLOY / "requirements").glob("c*.txt"))
PINNED = re.compile(
    r"^([A-Za-z0-9._-]+)==([^ ;\\]+)[^\n]*((?:\n +--hash=sha256:[0-9a-f]{64}[ \\]*)+)", re.M
)


def locked(path: Path) -> dict[str, str]:
    found = {canonicalize_name(m[1]): m[2] for m in PINNED.finditer(path.read_text())}
    named = re.findall(r"^[A-Za-z0-9._-]+==", path.read_text(), re.MULTILINE)
    assert len(found) == len(named), "one has no hash"
    return found


@pytest.mark.parametrize("path", LOCKED, ids=lambda path: path.stem)
def test_locked_requirements_are_those_of_the_package(path):
    versions = locked(path)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in project["dependencies"]:
        wanted = Requirement(text)
        assert wanted.specifier.contains(versions[canonicalize_name(wanted.name)]), text


def compose() -> dict[str, dict]:
    text = (DEPLOY / "docker/compose.yaml").read_text()
    text = re.sub(r"\$\{\w+:[-?]([^}]*)\}", r"\1", text)
    return yaml.safe_load(text)["services"]


def test_the_services_of_compose_are_configured_with_settings_that_exist():
    services = compose()
    assert {"gateway", "replica-1", "replica-2", "valkey", "prometheus", "grafana"} == set(services)
    for name in ("gateway", "replica-1", "replica-2"):
        command, variables = services[name]["command"], services[name]["environment"]
        schema = ROUTE if command[0] == "route" else SERVE
        given = {key: str(value) for key, value in variables.items() if value}
        assert env.read(given, schema)
        args = parse_flags(command[1:], (*SERVE_SPEC.options, *CONFIG_OPTIONS), tree=schema)
        config = (load_route if schema is ROUTE else load_settings)(args).config
        if schema is ROUTE:
            assert config.workers.urls == ("http://replica-1:30000", "http://replica-2:30000")
        else:
            assert config.tiers.storage == "valkey://valkey:6379/0"
    for service in services.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            if source.startswith(".") and "models" not in source:
                assert (DEPLOY / "docker" / source).exists(), source


def test_containers_have_time_to_drain():
    for name, section in (("gateway", 180), ("replica-1", 30)):
        assert int(compose()[name]["stop_grace_period"].rstrip("s")) > section


@pytest.mark.skipif(shutil.which("hadolint") is None, reason="hadolint is not installed")
def test_the_dockerfile_is_clean():
    subprocess.run(["hadolint", DEPLOY / "docker/Dockerfile"], check=True)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd-analyze")
@pytest.mark.parametrize("name", ["sylvan", "sylvan-gateway"])
def test_units_are_right_and_closed(name, tmp_path):
    shutil.copytree(DEPLOY / "systemd", tmp_path, dirs_exist_ok=True)
    unit = tmp_path / f"{name}.service"
    unit.write_text(unit.read_text().replace("/opt/sylvan/bin/sylvan", "/bin/true"))
    path = os.environ | {"SYSTEMD_UNIT_PATH": f"{tmp_path}:"}
    for words in (["verify", unit], ["security", "--offline=true", "--threshold=20", unit]):
        run = subprocess.run(
            ["systemd-analyze", *words], capture_output=True, text=True, check=False, env=path
        )
        assert run.returncode == 0, run.stdout + run.stderr
    assert "Unknown" not in run.stderr


def test_units_stop_no_sooner_than_servers_drain():
    for name, drain_s in (("sylvan", 30), ("sylvan-gateway", 180)):
        text = (DEPLOY / "systemd" / f"{name}.service").read_text()
        found = re.search(r"^TimeoutStopSec=(\d+)$", text, re.MULTILINE)
        assert found is not None
        assert int(found[1]) > drain_s
