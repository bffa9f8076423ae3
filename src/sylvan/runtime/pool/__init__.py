"""Memory for KV and recurrent states, on device and host.

A pool stores keys and values for attention (`mha`, `latent`), and gives access to its pages as
bytes (`pages`); `transfers` copies pages to and from the host. `states` holds recurrent states,
`prefault` makes pages resident before their first use, and `releasable` returns memory to the
system. The control plane decides who owns a page (`sylvan.runtime.cache`).
"""
