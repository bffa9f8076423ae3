"""Compiles every Triton kernel ahead of time, without a GPU, and measures what came out."""
