"""Shared by the Triton kernels: `choice` selects a kernel, `tiles` its sizes, `launch` runs it."""
