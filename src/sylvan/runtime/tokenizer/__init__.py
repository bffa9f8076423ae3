"""Requests in, text out: tokenisation, routing to schedulers, detokenisation."""
