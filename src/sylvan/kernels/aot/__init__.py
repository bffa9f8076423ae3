"""Compiles every Triton kernel ahead of time, without a GPU, and measures the binaries.

`cases` lists the shapes, `target` the chips, and `python -m sylvan.kernels.aot` prints the table.
"""
