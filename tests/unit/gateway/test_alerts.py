"""The alerts about gateways are about metrics that gateways have."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from sylvan.gateway.observe.metrics import GatewayMetrics

ALERTS = Path(__file__).parents[3] / "deploy" / "prometheus" / "sylvan-alerts.yaml"


def test_alerts_name_metrics_of_the_gateway():
    groups = yaml.safe_load(ALERTS.read_text())["groups"]
    [rules] = [group["rules"] for group in groups if group["name"] == "sylvan-gateway"]
    wanted = {name for rule in rules for name in re.findall(r"smg_\w+", rule["expr"])}
    families = {family.name: family.type for family in GatewayMetrics().registry.collect()}
    assert wanted
    for name in wanted:
        assert families[name.removesuffix("_total")] == "counter"
