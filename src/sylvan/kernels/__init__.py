"""One folder per op: PyTorch reference, C++ for CPUs, Triton for GPUs; chosen by capability."""
