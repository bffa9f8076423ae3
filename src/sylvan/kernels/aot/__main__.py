"""`python -m sylvan.kernels.aot`: compile every kernel for chips, print a table, check it.

Needs Triton but no GPU. Fails if a kernel spills registers (except where spilling was measured to
be faster, see `target.py`), or needs more shared memory than a program may have.
"""

from __future__ import annotations

import argparse
import sys
import time
from types import ModuleType

import rich
import triton
from rich.table import Table
from triton.compiler.errors import CompilationError

from sylvan.kernels.aot.cases import CompileCase, cases
from sylvan.kernels.aot.measure import Compiled, compiled, drop_binaries
from sylvan.kernels.aot.target import TARGETS, ChipTarget, compile_for


def main() -> int:
    """Return the exit status: 0 if every kernel passes on every requested chip."""
    parser = argparse.ArgumentParser(prog="python -m sylvan.kernels.aot", description=__doc__)
    names = [target.name for target in TARGETS]
    usual = [target.name for target in TARGETS if target.by_default]
    parser.add_argument(
        "--target", action="append", choices=names, help=f"default: {', '.join(usual)}"
    )
    parser.add_argument("--sample", action="store_true", help="a few kernels only")
    parser.add_argument("--only", default="", help="cases whose names contain this")
    args = parser.parse_args()
    begin, count, faults = time.perf_counter(), 0, 0
    for target in TARGETS:
        if target.name in (args.target or usual):
            chosen = [
                case
                for case in cases(target.fp8)
                if args.only in case.name and (case.sample or not args.sample)
            ]
            table, wrong = _judge(target, chosen)
            rich.print(table)
            count += table.row_count
            faults += wrong
    seconds = time.perf_counter() - begin
    rich.print(f"Triton {triton.__version__}, {count} kernels, {seconds:.0f} s, {faults} faults")
    return 1 if faults or not count else 0


def _judge(target: ChipTarget, chosen: list[CompileCase]) -> tuple[Table, int]:
    table = Table(title=target.name)
    for column in ("case", "kernel"):
        table.add_column(column, no_wrap=True)
    for column in ("registers", "spills", "shared", "matrix ops"):
        table.add_column(column, justify="right")
    table.add_column("verdict")
    faults = 0
    compile_for(target)
    for case in chosen:
        try:
            kernels = _compile(case)
        except CompilationError as error:
            faults += 1
            table.add_row(case.name, "does not compile", *[""] * 4, str(error).splitlines()[-1])
            continue
        for kernel in kernels:
            wrong = kernel.faults(target)
            faults += len(wrong)
            numbers = (kernel.registers, kernel.spilled, kernel.shared_bytes, kernel.matrix)
            verdict = "; ".join(wrong) or "ok"
            table.add_row(case.name, kernel.kernel, *(str(n) for n in numbers), verdict)
    return table, faults


def _compile(case: CompileCase) -> list[Compiled]:
    modules = _modules()
    drop_binaries(modules)
    case.call()
    return compiled(modules)


def _modules() -> list[ModuleType]:
    return [m for name, m in sys.modules.items() if name.startswith("sylvan.kernels.")]


sys.exit(main())
