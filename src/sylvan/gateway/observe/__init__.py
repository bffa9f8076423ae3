"""Observability of the gateway: metrics, access log, traces."""
