"""Building blocks of models; sharding, quantisation and fusion live here.

Layers call the ops of `sylvan.kernels.ops`, so the same code runs on tensors and is traced into
step programs. `mesh` describes how ranks shard dimensions; `build` is passed to every constructor.
"""
