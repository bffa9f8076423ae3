"""Step programs as JAX functions, which XLA compiles: for TPUs, and on CPUs to check them.

`program` lowers a graph op by op; the lowerings are in `rows`, `heads`, `experts`, `lora` and
`sparse`, and read and write `values`. `tensors` and `aten` lower modules that PyTorch computes.
"""
