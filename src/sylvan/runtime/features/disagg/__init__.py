"""Prefill and decode on different servers: KV of a prompt goes from one to the other."""
