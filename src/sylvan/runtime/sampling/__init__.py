"""Samples tokens from logits: parameters by request slot, processors, draws, log probabilities.

`draw` and `processors` define the results. `sampler` implements them in PyTorch, `native` in one
call of the C++ kernels, `on_device` without waiting for a device. `params` holds the parameters.
"""
