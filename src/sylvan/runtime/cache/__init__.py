"""Ownership of KV pages: prefix tree, allocators, tiers; numpy only.

`manager.KVCacheManager` is the only interface for the scheduler: it lends pages to requests as a
`KVHandle`, publishes them to the prefix tree (`radix.RadixCache`) and evicts from there. `pages`
allocates page numbers, `windows` and `states` own the memory of sliding-window and recurrent
layers, `residency` and `loads` move KV between tiers. Types are in `types`. It knows page numbers,
not tensors; the memory itself is in `sylvan.runtime.pool`.
"""
