"""Shared by the Triton kernels: selection, tile sizes and launching."""
