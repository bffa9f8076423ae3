"""Tells routers outside which KV blocks are cached, over a ZeroMQ publisher."""
