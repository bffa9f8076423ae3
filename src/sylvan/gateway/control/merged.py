"""Merges the metrics of several workers into one text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

LABEL = "worker_addr"


def merged(texts: Mapping[str, str]) -> str:
    """Merge all samples, each labelled with its worker. Unparsable text is left out.

    Args:
        texts: Metrics text by worker.
    """
    families: dict[str, Metric] = {}
    for worker, text in texts.items():
        try:
            found = list(text_string_to_metric_families(text))
        except ValueError:
            continue
        for family in found:
            known = families.setdefault(
                family.name, Metric(family.name, family.documentation, family.type)
            )
            if known.type == family.type:
                known.samples += [
                    Sample(s.name, {**s.labels, LABEL: worker}, s.value) for s in family.samples
                ]
    registry = CollectorRegistry()
    registry.register(_Families(families.values()))
    return generate_latest(registry).decode()


class _Families(Collector):
    """A collector that returns given families unchanged."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families
