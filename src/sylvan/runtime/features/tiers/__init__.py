"""KV tiers: copies cached prefixes to host memory and a store, and loads them back.

The prefix tree decides what is written where (`cache.residency`); `host` and `tier` are the two
tiers as it sees them. `control.KVTiers` starts writes and loads, and lets requests wait for
fetches (`prefetch`). `worker.KVTiersWorker` owns a `mover.Mover`, which moves the bytes between
device, host memory and the store (`sylvan.runtime.storage`).
"""
