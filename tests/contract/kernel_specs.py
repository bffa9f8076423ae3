"""Kernels of another package, as `docs/extend/index.md` shows them."""

from sylvan.kernels.registry import KernelSpec

KERNELS = (
    KernelSpec(
        op="norm.rms_norm",  # folder and function of the reference, whose arguments it gets
        backend="mine",
        device="cuda",  # of the tensors
        dtypes=frozenset({"bfloat16"}),  # of the first tensor; none: any
        chips=("sm_9", "sm_10"),  # beginnings of names; none: any
        takes="my_package.norms:takes_shape",  # called with the arguments; none: it takes all
        target="my_package.norms:rms_norm",
        package="triton",  # that must be installed
    ),
)
