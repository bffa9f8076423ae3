"""Explains prefix cache hits and misses, and lists the cache's contents (`/cache/...`).

`control.CacheExplain` has no worker half.
"""
