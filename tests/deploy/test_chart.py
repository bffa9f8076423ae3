"""The Helm chart, rendered by Helm's own engine: golden files, schemas, and what must fit together.

`UPDATE_GOLDEN=1 python -m pytest tests/deploy/test_chart.py` writes the golden files.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

import pytest
import yaml

from sylvan.cli.route import load_route
from sylvan.cli.settings import load_settings
from sylvan.config.flags import CONFIG_OPTIONS, Parsed, parse_flags
from sylvan.config.sources import gather

helm = pytest.importorskip("helm_python")
kubernetes_validate = pytest.importorskip("kubernetes_validate")

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy/helm/sylvan"
EXAMPLES = ROOT / "deploy/helm/examples"
GOLDEN = Path(__file__).parent / "charts"
NAMES = ("default", *sorted(path.stem for path in EXAMPLES.glob("*.yaml")))
# Kinds that clusters learn from others: their schemas are not among Kubernetes' own.
FOREIGN = (
    *("keda.sh", "monitoring.coreos.com", "gateway.networking", "inference.networking"),
    "leaderworkerset.x-k8s.io",
)
KEYS = {"apiKey": "client", "adminKey": "admin", "gatewayKey": "between", "disaggSecret": "kv"}


def values_of(name):
    values = {} if name == "default" else yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    return {**values, "auth": KEYS}


@functools.cache
def rendered(name):
    """Text of all objects, in the order of their files."""
    files = helm.Chart.load(CHART).render(values_of(name), name="llm", namespace="serving")
    texts = [text.strip() for path, text in sorted(files.items()) if path.endswith(".yaml")]
    return "\n---\n".join(text.removeprefix("---").strip() for text in texts if text) + "\n"


def objects(name):
    return [one for one in yaml.safe_load_all(rendered(name)) if one]


def of_kind(name, kind):
    return [one for one in objects(name) if one["kind"] == kind]


def pods(name):
    groups = [one["spec"]["leaderWorkerTemplate"] for one in of_kind(name, "LeaderWorkerSet")]
    return [
        *(one["spec"]["template"] for one in of_kind(name, "Deployment")),
        *(group[part] for group in groups for part in ("leaderTemplate", "workerTemplate")),
    ]


def selects(selector, labels):
    return all(labels.get(key) == value for key, value in selector.items())


@pytest.mark.parametrize("name", NAMES)
def test_helm_finds_nothing_to_complain_about(name):
    found = helm.lint(CHART, values_of(name), strict=True)

    serious = [m for m in found["messages"] if m["severity"] > 1]
    assert (serious, found["errors"]) == ([], [])


@pytest.mark.parametrize("name", NAMES)
def test_golden_files_show_what_is_rendered(name):
    path = GOLDEN / f"{name}.yaml"
    if "UPDATE_GOLDEN" in os.environ:
        path.write_text(rendered(name))
    assert rendered(name) == path.read_text()


@pytest.mark.slow
@pytest.mark.parametrize("version", ["1.29", "1.37"])
@pytest.mark.parametrize("name", NAMES)
def test_objects_fit_the_schemas_of_kubernetes(name, version):
    checked = 0
    for one in objects(name):
        if one["apiVersion"].startswith(FOREIGN):
            continue
        kubernetes_validate.validate(one, version, strict=True)
        checked += 1
    assert checked > 8


def test_a_misspelt_value_is_refused():
    values = {**values_of("default"), "gateway": {"replica": 3}}

    with pytest.raises(helm.HelmError, match="replica"):
        helm.Chart.load(CHART).validate_schema(values)


@pytest.mark.parametrize("name", NAMES)
def test_sylvan_takes_the_settings(name, tmp_path):
    for one in of_kind(name, "ConfigMap"):
        for file, text in one["data"].items():
            path = tmp_path / f"{one['metadata']['name']}-{file}"
            path.write_text(text)
            args = Parsed(options={"config": str(path)})
            loaded = load_route(args) if file == "route.yaml" else load_settings(args)
            assert loaded.config.server.host == "0.0.0.0"
            assert loaded.config.server.port == 30000


@pytest.mark.parametrize("name", NAMES)
def test_the_gateway_finds_every_server_and_nothing_else(name, tmp_path):
    (settings,) = [
        yaml.safe_load(one["data"]["route.yaml"])
        for one in of_kind(name, "ConfigMap")
        if "route.yaml" in one["data"]
    ]
    found = settings["discovery"]
    groups = {"regular": "selector", "prefill": "prefill_selector", "decode": "decode_selector"}
    for pod in pods(name):
        labels = pod["metadata"]["labels"]
        role = labels.get("sylvan/role")
        seen = [r for r, key in groups.items() if selects(found.get(key) or {"-": "-"}, labels)]
        assert seen == ([role] if role else [])


@pytest.mark.parametrize("name", NAMES)
def test_selectors_of_services_and_budgets_find_pods(name):
    labels = [pod["metadata"]["labels"] for pod in pods(name)]
    services = [one["spec"]["selector"] for one in of_kind(name, "Service")]
    budgets = of_kind(name, "PodDisruptionBudget")
    for selector in (*services, *(b["spec"]["selector"]["matchLabels"] for b in budgets)):
        found = [one for one in labels if selects(selector, one)]
        assert len({one.get("sylvan/pool", "gateway") for one in found}) == 1


@pytest.mark.parametrize("name", NAMES)
def test_pods_may_do_nothing_that_they_need_not(name):
    for pod in pods(name):
        spec = pod["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] is True
            assert security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert "memory" in container["resources"].get("requests", {})


def test_probes_ask_what_they_mean_and_servers_have_it():
    routes = (ROOT / "docs/reference/http.md").read_text()
    for pod in pods("default"):
        (container,) = pod["spec"]["containers"]
        asked = {
            kind: container[kind]["httpGet"]["path"]
            for kind in ("startupProbe", "readinessProbe", "livenessProbe")
        }
        assert asked == {
            "startupProbe": "/live",
            "readinessProbe": "/ready",
            "livenessProbe": "/live",
        }
        assert all(f"| GET `{path}` | open |" in routes for path in asked.values())


def test_a_pod_has_time_to_drain_before_it_is_killed():
    for config, pod in (("serve.yaml", "worker"), ("route.yaml", "gateway")):
        (settings,) = [
            yaml.safe_load(one["data"][config])
            for one in of_kind("default", "ConfigMap")
            if config in one["data"]
        ]
        (spec,) = [
            p["spec"]
            for p in pods("default")
            if p["metadata"]["labels"]["app.kubernetes.io/component"] == pod
        ]
        pause = int(spec["containers"][0]["lifecycle"]["preStop"]["exec"]["command"][1])
        assert spec["terminationGracePeriodSeconds"] > settings["server"]["drain_s"] + pause


def test_pods_of_a_group_know_their_places_and_take_the_flags():
    (group,) = of_kind("several-machines", "LeaderWorkerSet")
    deployments = of_kind("several-machines", "Deployment")
    assert [one["metadata"]["name"] for one in deployments] == ["llm-gateway"]
    template = group["spec"]["leaderWorkerTemplate"]
    leader, worker = template["leaderTemplate"]["spec"], template["workerTemplate"]["spec"]
    assert template["size"] == 2
    given = leader["containers"][0]["args"]
    assert given == worker["containers"][0]["args"]
    told = {"LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "llm-0.llm"}
    words = [functools.reduce(lambda w, n: w.replace(f"$({n})", told[n]), told, w) for w in given]
    (settings,) = [
        one["data"]["serve.yaml"]
        for one in of_kind("several-machines", "ConfigMap")
        if "serve.yaml" in one["data"]
    ]
    parsed = parse_flags(words[4:], CONFIG_OPTIONS)
    found = gather(parsed.given).config.parallel
    assert (found.nodes, found.node_rank, found.address) == (2, 1, "llm-0.llm:20000")
    assert yaml.safe_load(settings)["parallel"]["tp"] % found.nodes == 0
    assert "startupProbe" in leader["containers"][0]
    assert "startupProbe" not in worker["containers"][0]
