"""Code that the Triton kernels share: `choice` selects a kernel, `tiles` its sizes; `launch` runs it."""
