"""Kinds of devices: static properties, probes, and one interface for streams, graphs and memory.

`find` lists the kinds (`kinds`, and those of other packages) and opens a device; `facts` describes
a kind without importing torch; `probe` explains why one cannot be used; `api` is the interface of
an open device, which `accelerator`, `apple`, `host` and `jax_devices` implement.
"""
