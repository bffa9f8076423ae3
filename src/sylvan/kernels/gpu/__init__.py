"""What the Triton kernels share: when they are chosen, their tiles, how they are launched."""
