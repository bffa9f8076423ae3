"""Publishes which KV blocks are cached to external routers, over ZeroMQ."""
