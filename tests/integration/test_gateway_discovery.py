"""Workers that come and go by a list, under requests."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from urllib.parse import unquote

import pytest
from kubernetes_asyncio.config import kube_config

from tests.support.cluster import gateway, scripted, served, until
from tests.support.scripted import write_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_checkpoint(tmp_path_factory.mktemp("scripted"))


def settings(file):
    return {"discovery__file": str(file), "discovery__interval_s": 0.02}


def urls(front):
    return {worker.url for worker in front.runtime.registry.workers}


def listed(file, *rows):
    new = file.with_suffix(".new")
    new.write_text(json.dumps(rows))
    new.replace(file)


async def test_workers_follow_the_file(checkpoint, tmp_path):
    file = tmp_path / "workers.json"
    async with (
        scripted(checkpoint) as a,
        scripted(checkpoint) as b,
        scripted(checkpoint) as fixed,
        gateway(fixed.url, **settings(file)) as front,
    ):
        listed(file, a.url, {"url": b.url, "priority": 50})
        await until(lambda: urls(front) == {a.url, b.url, fixed.url})
        assert front.metric("smg_discovery_workers_discovered", source="file") == 2

        file.write_text("garbage")  # a half-written file removes no worker
        await until(
            lambda: front.metric("smg_discovery_sync_duration_seconds_count", source="file") > 5
        )
        assert urls(front) == {a.url, b.url, fixed.url}

        listed(file, {"url": b.url, "priority": 90})
        await until(lambda: urls(front) == {b.url, fixed.url})
        await until(lambda: front.runtime.registry.by_url(b.url).spec.priority == 90)
        reply = await front.post("/v1/completions", {"model": "scripted", "prompt": "x"})
        assert reply.status_code == 200
        assert len(b.engine.control.requests) == 1  # the higher priority

        listed(file)
        await until(lambda: urls(front) == {fixed.url})


async def test_what_is_on_the_list_and_was_given_is_added_once(checkpoint, tmp_path):
    file = tmp_path / "workers.json"
    async with scripted(checkpoint) as a, gateway(a.url, **settings(file)) as front:
        listed(file, a.url)
        await until(
            lambda: (
                front.metric("smg_discovery_registrations_total", source="file", result="duplicate")
                > 0
            )
        )
        listed(file)
        await until(lambda: front.metric("smg_discovery_workers_discovered", source="file") == 0)
        assert urls(front) == {a.url}


async def test_a_worker_that_has_not_come_yet_and_goes_is_not_waited_for(checkpoint, tmp_path):
    file = tmp_path / "workers.json"
    async with scripted(checkpoint) as a, gateway(a.url, **settings(file)) as front:
        listed(file, "http://127.0.0.1:9")
        await until(lambda: len(front.runtime.jobs.open) == 1)
        listed(file)
        await until(lambda: front.runtime.jobs.open == [])
        assert urls(front) == {a.url}


async def test_names_are_resolved(checkpoint):
    async with scripted(checkpoint) as a:
        port = a.url.rpartition(":")[2]
        changes = {"discovery__dns": f"localhost:{port}", "discovery__interval_s": 0.02}
        async with gateway(wait=0, **changes) as front:
            await until(lambda: f"http://127.0.0.1:{port}" in urls(front))


def pod(address, *, ready=True, **changes):
    """A pod as the API server shows it."""
    metadata = {"name": "p", "namespace": "llm", "annotations": changes.get("annotations")}
    if changes.get("deleted"):
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    condition = {"type": "Ready", "status": "True" if ready else "False"}
    status = {"phase": changes.get("phase", "Running"), "podIP": address}
    return {"metadata": metadata, "spec": None, "status": {**status, "conditions": [condition]}}


@dataclass
class ApiServer:
    """A fake API server of a cluster, which records its requests.

    `labelled` has the pods of certain selectors; all others match `pods`.
    """

    labelled: dict[str, list[dict[str, object]]] = field(default_factory=dict)
    pods: list[dict[str, object]] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)
    status: int = 200

    async def __call__(self, scope, receive, send):
        self.asked.append((scope["path"], scope["query_string"].decode()))
        selector = unquote(self.asked[-1][1]).removeprefix("labelSelector=")
        items = self.labelled.get(selector, self.pods)
        content = {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": items}
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(content).encode()})


@pytest.fixture
async def cluster(tmp_path, monkeypatch):
    server = ApiServer()
    async with served(server) as url:
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
            "clusters": [{"name": "c", "cluster": {"server": url}}],
            "users": [{"name": "u", "user": {"token": "t"}}],
        }
        file = tmp_path / "kubeconfig"
        file.write_text(json.dumps(config))
        monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(file))
        yield server


def in_kubernetes(port, **changes):
    return {
        "discovery__kubernetes": True,
        "discovery__selector": {"app": "sylvan", "tier": "prod"},
        "discovery__port": port,
        "discovery__interval_s": 0.02,
        **changes,
    }


async def test_pods_that_are_ready_are_workers(checkpoint, cluster):
    async with scripted(checkpoint) as a:
        port = int(a.url.rpartition(":")[2])
        cluster.pods = [
            pod("127.0.0.2", ready=False),
            pod("127.0.0.3", phase="Pending"),
            pod("127.0.0.4", deleted=True),
            pod(None),
        ]
        settings = in_kubernetes(port, discovery__namespace="llm")
        async with gateway(wait=0, **settings) as front:
            await until(lambda: len(cluster.asked) > 2)
            assert front.runtime.jobs.open == []
            cluster.pods = [*cluster.pods, pod("127.0.0.1")]
            await until(lambda: urls(front) == {a.url})
            path, query = cluster.asked[0]
            assert path == "/api/v1/namespaces/llm/pods"
            assert unquote(query) == "labelSelector=app=sylvan,tier=prod"

            cluster.status = 500  # the API server is down: workers stay registered
            seen = len(cluster.asked)
            await until(lambda: len(cluster.asked) > seen + 2)
            assert urls(front) == {a.url}

            cluster.status, cluster.pods = 200, [pod("127.0.0.1", deleted=True)]
            await until(lambda: urls(front) == set())


async def test_all_namespaces_are_looked_at_unless_one_is_named(cluster):
    async with gateway(wait=0, **in_kubernetes(1)):
        await until(lambda: bool(cluster.asked))
    assert cluster.asked[0][0] == "/api/v1/pods"


async def test_pods_of_prefill_and_decode_have_selectors_of_their_own(cluster, caplog):
    annotated = {"sglang.ai/bootstrap-port": "9001"}
    cluster.labelled = {
        "role=p": [
            pod("127.0.0.1", annotations=annotated),
            pod("127.0.0.2", annotations={"sglang.ai/bootstrap-port": "no port"}),
            pod("127.0.0.3"),
        ],
        "role=d": [pod("127.0.0.4", annotations=annotated)],
        "app=sylvan": [pod("127.0.0.1"), pod("127.0.0.5")],
    }
    settings = in_kubernetes(
        9,
        discovery__selector={"app": "sylvan"},
        discovery__prefill_selector={"role": "p"},
        discovery__decode_selector={"role": "d"},
    )
    async with gateway(wait=0, **settings) as front:
        await until(lambda: len(front.runtime.jobs.open) == 5)
        jobs = front.runtime.jobs.open
        source = front.metric("smg_discovery_workers_discovered", source="kubernetes")
    assert source == 5
    assert len({job.url for job in jobs}) == 5
    assert "'no port' is not a port" in caplog.text


async def test_the_kind_and_port_of_pods_are_theirs(checkpoint, cluster):
    annotated = {"sglang.ai/bootstrap-port": "9001"}
    async with scripted(checkpoint) as a:
        port = int(a.url.rpartition(":")[2])
        cluster.labelled = {"role=p": [pod("127.0.0.1", annotations=annotated)], "role=d": []}
        settings = in_kubernetes(
            port,
            discovery__selector={},
            discovery__prefill_selector={"role": "p"},
            discovery__decode_selector={"role": "d"},
        )
        async with gateway(wait=0, **settings) as front:
            await until(lambda: urls(front) == {a.url})
            [worker] = front.runtime.registry.workers
            assert (worker.kind, worker.spec.bootstrap_port) == ("prefill", 9001)
