"""Step programs as JAX functions, which XLA compiles: for TPUs, and on CPUs to check them."""
