"""Discovers workers from pods that match selectors; needs the extra `kubernetes`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import aiohttp
import msgspec
from kubernetes_asyncio import client, config

from sylvan.config.route import DiscoveryConfig
from sylvan.gateway.discovery.api import DiscoveryError
from sylvan.gateway.workers.spec import Kind, WorkerSpec, normal_url

logger = logging.getLogger(__name__)

TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class PodGroup:
    """Pods with the same role.

    Attributes:
        kind: Their role.
        labels: Labels that select them; not empty.
    """

    kind: Kind
    labels: Mapping[str, str]

    @property
    def selector(self) -> str:
        """The label selector in the syntax of the API server."""
        return ",".join(f"{key}={value}" for key, value in sorted(self.labels.items()))


class KubernetesSource:
    """Ready pods in one namespace or in all.

    Uses the credentials of the pod that runs the gateway, or of the kubeconfig. They are read for
    each call, because tokens are rotated while a pod lives. Needs the rights `get` and `list` on
    pods.

    Args:
        groups: Which pods; a pod that matches several groups belongs to the first.
        config: Namespace and port of the pods, and the annotation that holds the bootstrap port of
            a prefill pod.
        template: Settings common to all workers.
    """

    name: ClassVar[str] = "kubernetes"

    def __init__(
        self, groups: Sequence[PodGroup], config: DiscoveryConfig, template: WorkerSpec
    ) -> None:
        self._groups = groups
        self._config = config
        self._template = template
        self._last: Sequence[WorkerSpec] | None = None

    async def list_workers(self) -> Sequence[WorkerSpec] | None:
        found: dict[str, WorkerSpec] = {}
        try:
            async with asyncio.timeout(TIMEOUT_S):
                for group in self._groups:
                    for pod in filter(_serves, await self._pods(group.selector)):
                        spec = self._spec(group.kind, pod)
                        found.setdefault(spec.url, spec)
        except TimeoutError as error:
            raise DiscoveryError(f"the API server did not answer in {TIMEOUT_S:g} s") from error
        except (config.ConfigException, client.ApiException, aiohttp.ClientError, OSError) as error:
            raise DiscoveryError(f"pods cannot be listed: {str(error)[:300]}") from error
        specs = [found[url] for url in sorted(found)]
        if specs == self._last:
            return None
        self._last = specs
        return specs

    async def _pods(self, selector: str) -> Sequence[Any]:
        library: Any = client  # untyped library
        loaders: Any = config
        settings = library.Configuration()
        try:
            loaders.load_incluster_config(client_configuration=settings)
        except config.ConfigException:
            await loaders.load_kube_config(client_configuration=settings)
        async with library.ApiClient(settings) as connection:
            api = library.CoreV1Api(connection)
            options = {"label_selector": selector}
            if self._config.namespace is None:
                found = await api.list_pod_for_all_namespaces(**options)
            else:
                found = await api.list_namespaced_pod(self._config.namespace, **options)
        return found.items

    def _spec(self, kind: Kind, pod: Any) -> WorkerSpec:
        address: str = pod.status.pod_ip
        shown = f"[{address}]" if ":" in address else address
        return msgspec.structs.replace(
            self._template,
            url=normal_url(f"http://{shown}:{self._config.port}"),
            worker_type=kind,
            bootstrap_port=self._bootstrap_port(pod) if kind == "prefill" else None,
        )

    def _bootstrap_port(self, pod: Any) -> int | None:
        """Read the port from the annotation; ignore a value that is not a port."""
        annotations: dict[str, str] = pod.metadata.annotations or {}
        given = annotations.get(self._config.bootstrap_annotation, "")
        if given.isascii() and given.isdigit() and 0 < int(given) < 65536:
            return int(given)
        if given:
            name = self._config.bootstrap_annotation
            logger.warning("pod %s: %s=%r is not a port", pod.metadata.name, name, given[:40])
        return None


def _serves(pod: Any) -> bool:
    """Whether a pod is running, ready, and not terminating."""
    status = pod.status
    if pod.metadata.deletion_timestamp is not None or status.phase != "Running":
        return False
    ready = any(c.type == "Ready" and c.status == "True" for c in status.conditions or ())
    return bool(status.pod_ip) and ready
