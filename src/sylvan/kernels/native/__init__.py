"""The library of C++ kernels: finding it, recording programs for it, running them."""
