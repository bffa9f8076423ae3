from __future__ import annotations

import dataclasses

import pytest

from sylvan import lang as sgl
from sylvan.lang import ir


def test_addition_concatenates_flat_and_in_order():
    expr = "a" + sgl.gen("x") + "b" + (sgl.user("q") + ["c", "d"])

    kinds = [type(node).__name__ for node in ir.flatten(expr)]

    assert kinds == [
        "ConstantText", "Gen", "ConstantText", "RoleBegin", "ConstantText", "RoleEnd",
        "ConstantText", "ConstantText",
    ]  # fmt: skip
    assert not any(isinstance(item, ir.ExprList) for item in expr.items)


def test_nodes_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ir.ConstantText("a").value = "b"  # pyright: ignore
    with pytest.raises(TypeError):
        sgl.gen("x", 5).params["n"] = 2  # pyright: ignore


@pytest.mark.parametrize(
    ("value", "error"), [(None, ValueError), (3, TypeError), ({"a": 1}, TypeError)]
)
def test_as_expr_refuses_what_is_no_text(value, error):
    with pytest.raises(error):
        ir.as_expr(value)


def test_argument_tells_why_it_cannot_be_used_in_a_trace():
    argument = ir.Argument("question")

    for use in (lambda: f"{argument}", lambda: bool(argument), lambda: len(argument)):
        with pytest.raises(TypeError):
            use()


def test_reasoning_needs_names():
    with pytest.raises(ValueError, match="name"):
        sgl.separate_reasoning(sgl.gen(), "qwen3")
    with pytest.raises(ValueError, match="model_type"):
        sgl.separate_reasoning(sgl.gen("x"))


def test_image_of_bytes_is_short_in_print():
    assert repr(ir.Image(b"x" * 1000)) == "Image(1000 bytes)"
