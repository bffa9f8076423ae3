"""Publishes over ZeroMQ, for external routers, which KV blocks are cached.

`control.KVEvents` reads the events of the prefix tree, `blocks` converts them, `publisher` sends
them.
"""
