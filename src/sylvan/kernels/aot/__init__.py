"""Compiles every Triton kernel ahead of time, without a GPU, and measures the binaries."""
