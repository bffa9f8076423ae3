"""Requests that a prefill worker and a decode worker serve together."""
