"""Pods that match a selector; needs the extra `kubernetes`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import aiohttp
import msgspec
from kubernetes_asyncio import client, config

from sylvan.gateway.discovery.api import LookError
from sylvan.gateway.workers.spec import WorkerSpec, normal_url

TIMEOUT_S = 10.0


class KubernetesSource:
    """Pods that are ready, in one namespace or all of them.

    Credentials are those of the pod that this gateway runs in, or of the kubeconfig; they are read
    for each look, since tokens are replaced while pods live. Needs the rights `get` and `list` on
    pods.

    Args:
        selector: Labels that pods must have; not empty.
        namespace: Of the pods; None: all.
        port: Of the servers.
        template: What holds for all workers.
    """

    name: ClassVar[str] = "kubernetes"

    def __init__(
        self,
        selector: Mapping[str, str],
        namespace: str | None,
        port: int,
        template: WorkerSpec,
    ) -> None:
        self._selector = ",".join(f"{key}={value}" for key, value in sorted(selector.items()))
        self._namespace = namespace
        self._port = port
        self._template = template
        self._last: Sequence[str] | None = None

    async def look(self) -> Sequence[WorkerSpec] | None:
        """See `Source.look`."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                pods = await self._pods()
        except TimeoutError as error:
            raise LookError(f"the API server did not answer in {TIMEOUT_S:g} s") from error
        except (config.ConfigException, client.ApiException, aiohttp.ClientError, OSError) as error:
            raise LookError(f"pods cannot be listed: {str(error)[:300]}") from error
        urls = sorted({self._url(pod.status.pod_ip) for pod in pods if _serves(pod)})
        if urls == self._last:
            return None
        self._last = urls
        return [msgspec.structs.replace(self._template, url=url) for url in urls]

    async def _pods(self) -> Sequence[Any]:
        library: Any = client  # it has no types
        loaders: Any = config
        settings = library.Configuration()
        try:
            loaders.load_incluster_config(client_configuration=settings)
        except config.ConfigException:
            await loaders.load_kube_config(client_configuration=settings)
        async with library.ApiClient(settings) as connection:
            api = library.CoreV1Api(connection)
            asked = {"label_selector": self._selector}
            if self._namespace is None:
                found = await api.list_pod_for_all_namespaces(**asked)
            else:
                found = await api.list_namespaced_pod(self._namespace, **asked)
        return found.items

    def _url(self, address: str) -> str:
        shown = f"[{address}]" if ":" in address else address
        return normal_url(f"http://{shown}:{self._port}")


def _serves(pod: Any) -> bool:
    """Whether a pod is up, ready, and not about to end."""
    status = pod.status
    if pod.metadata.deletion_timestamp is not None or status.phase != "Running":
        return False
    ready = any(c.type == "Ready" and c.status == "True" for c in status.conditions or ())
    return bool(status.pod_ip) and ready
