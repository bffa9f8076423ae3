"""Data types that scheduler, executor and models share: requests, step plans, forward batches.

`req` has the scheduler's view of a request and a step, `step` what it sends to the executor and
gets back, `wire` both as bytes, `forward` a step as the model sees it, and `memory` KV pages as
bytes. Only `forward` uses tensors.
"""
