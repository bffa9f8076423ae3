"""Observability: metrics, traces, request logs, profiles."""
