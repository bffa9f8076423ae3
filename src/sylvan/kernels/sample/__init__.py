"""Batch sampling in one call: penalties, masks, bias, draws and log probabilities.

`sampler` calls the C++ kernels (`sample.cpp`); `triton_sample` is the sampler of GPUs. The results
are defined by `sylvan.runtime.sampling`.
"""
