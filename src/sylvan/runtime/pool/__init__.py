"""Bytes of KV on device and host."""
