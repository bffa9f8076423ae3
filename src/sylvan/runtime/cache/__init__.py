"""Ownership of KV pages: prefix tree, allocators, tiers; numpy only."""
