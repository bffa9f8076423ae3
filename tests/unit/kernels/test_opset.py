"""Ops as data, their C++ side, and the digest that both have in common."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import pytest

from sylvan.kernels import build
from sylvan.kernels.native.codegen import digest, header, snake
from sylvan.kernels.native.opset import OPS, Attention, AttentionMerge, RmsNorm
from sylvan.kernels.native.schema import (
    BufferRef,
    Op,
    buffers_of,
    fields_of,
    operands,
    reads,
    writes,
)


@operands
class Twice(Op):
    """An op for these tests."""

    x: Annotated[int, reads("row", "T, C")]
    bias: Annotated[BufferRef, reads("f32", "C")] = None
    out: Annotated[int, writes("row", "T, C")]
    cols: int
    factor: float = 2.0


def test_fields_are_in_the_order_of_the_struct():
    found = [(part.name, part.kind, part.optional) for part in fields_of(Twice)]

    assert found == [
        ("x", "buffer", False),
        ("bias", "buffer", True),
        ("out", "buffer", False),
        ("cols", "int", False),
        ("factor", "float", False),
    ]


def test_buffers_are_listed_with_their_use():
    found = [(part.name, part.access, part.ref) for part in buffers_of(Twice(x=3, out=~0, cols=1))]

    assert found == [("x", "read", 3), ("out", "write", ~0)]


def test_operands_of_a_group_have_its_name_in_front():
    names = [part.name for part in fields_of(RmsNorm)]

    assert names[:3] == ["stream.residual", "stream.x", "stream.base"]
    assert fields_of(Attention) == fields_of(AttentionMerge)


def test_a_field_that_structs_cannot_hold_is_refused():
    @operands
    class Bad(Op):
        """Has a text."""

        name: str

    with pytest.raises(TypeError, match=r"Bad\.name: <class 'str'>"):
        fields_of(Bad)


def test_a_class_that_was_not_decorated_is_refused():
    class Bare(Op):
        """Lacks the decorator."""

        cols: int

    with pytest.raises(TypeError, match="Bare is not decorated"):
        fields_of(Bare)


def test_a_struct_has_typed_members():
    text = header((Twice,))

    assert "struct Twice : Op {\n    Buf<void> x;" in text
    assert "Buf<float> bias;  // read, f32 [C], or absent" in text
    assert "    float factor;\n};\nstatic_assert(sizeof(Twice) == sizeof(Op) + 4 * 5);" in text
    assert "#define SYLVAN_OPS(X) X(twice)" in text


def _renamed(name: str, **types: object) -> type[Op]:
    made = type(name, (Op,), {"__annotations__": types, "__doc__": "", "__module__": __name__})
    return operands(made)


@pytest.mark.parametrize(
    "other",
    [
        {"rows_": int, "cols": int},
        {"cols": int, "count": int},
        {"count": int, "cols": float},
        {"count": int},
    ],
    ids=["renamed", "order", "type", "fewer"],
)
def test_the_digest_tells_ops_apart(other: dict[str, object]):
    plain = _renamed("One", count=int, cols=int)

    assert digest((plain,)) == digest((_renamed("One", count=int, cols=int),))
    assert digest((plain,)) != digest((_renamed("One", **other),))
    assert digest((plain,)) != digest((_renamed("Another", count=int, cols=int),))


def test_the_digest_does_not_depend_on_descriptions():
    first = _renamed("One", x=Annotated[int, reads("row", "T, C")])
    second = _renamed("One", x=Annotated[int, reads("row", "T, columns")])

    assert digest((first,)) == digest((second,))


def test_each_op_has_a_kernel_of_its_name():
    sources = "".join(path.read_text() for path in build.sources())
    lacking = [op for op in OPS if f"const Kernel {snake(op.__name__)}_kernel[2]" not in sources]

    assert not lacking


def test_no_kernel_reads_operands_by_number():
    folder = Path(build.__file__).parent
    for path in (*build.sources(), *folder.glob("*/*.h")):
        text = path.read_text()
        assert not any(old in text for old in ("op.n[", "op.buf[", "op.f[")), path


def test_the_header_is_made_where_nothing_is_installed(tmp_path: Path):
    """As the build hook does: no package is importable, and neither numpy nor torch is."""
    script = f"""
import importlib.util, sys
sys.path = [p for p in sys.path if "site-packages" not in p and not p.endswith("src")]
spec = importlib.util.spec_from_file_location("sylvan_kernels_build", {str(build.__file__)!r})
module = importlib.util.module_from_spec(spec)
sys.modules[spec.name] = module
spec.loader.exec_module(module)
module.write_header(__import__("pathlib").Path({str(tmp_path)!r}))
assert "numpy" not in sys.modules and "sylvan" not in sys.modules
"""
    subprocess.run([sys.executable, "-S", "-c", script], check=True)

    assert (tmp_path / "ops.h").read_text() == header(OPS)
