"""Explains prefix cache hits and misses, and lists the cache's contents."""
