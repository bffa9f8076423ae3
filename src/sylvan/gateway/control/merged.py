"""Metrics of several workers as one text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from prometheus_client.samples import Sample

LABEL = "worker_addr"


def merged(texts: Mapping[str, str]) -> str:
    """All samples, each with its worker as a label. What is no metrics is left out.

    Args:
        texts: By worker.
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
    """Families as they are."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = list(families)

    def collect(self) -> Iterable[Metric]:
        return self._families
