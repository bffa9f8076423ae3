# ruff: noqa: PLW2901 - `state += ...` is how programs append
from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from sylvan import lang as sgl
from sylvan.lang import ir
from sylvan.lang.chat_templates import get_chat_template
from sylvan.lang.tracer import Traceable, extract_prefix


def prefix(program, template="default"):
    traceable = Traceable(program.func, program.arg_names, program.bind_arguments)
    return extract_prefix(traceable, get_chat_template(template))


def test_prefix_ends_at_the_first_argument():
    @sgl.function
    def program(s, question):
        s += "Few-shot examples.\n" + "Q: " + question + "\nA:" + sgl.gen("a")

    assert prefix(program) == "Few-shot examples.\nQ: "
    assert prefix(program.bind(question="why")) == "Few-shot examples.\nQ: why\nA:"


def test_prefix_spells_roles_and_the_default_system_prompt():
    @sgl.function
    def program(s, question):
        s += sgl.user("Hello. " + question)

    assert prefix(program, "qwen") == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nHello. "
    )


@pytest.mark.parametrize(
    "body",
    [
        lambda s, x: s.__iadd__(f"{x}"),
        lambda s, x: s.fork(2),
        lambda s, x: s.text(),
        lambda s, x: s.__iadd__(sgl.gen("y")),
        lambda s, x: 1 / 0,
        lambda s, x: int(x),
        lambda s, x: [s.__iadd__(i) for i in x],
    ],
)
def test_prefix_ends_where_the_program_needs_more_than_text(body):
    @sgl.function
    def program(s, x):
        s += "known"
        body(s, x)

    assert prefix(program) == "known"


def tot(s, question, n):
    s += sgl.user("Q: " + question)
    forks = s.fork(n)
    for fork in forks:
        fork += sgl.assistant(sgl.gen("plan"))
    forks.join()
    s += s["plan"]
    with s.var_scope("end"):
        s += sgl.select("best", ["1", "2"])


def test_trace_records_forks_variables_and_arguments():
    trace = sgl.function(tot).trace(n=2)

    kinds = [type(node).__name__ for node in trace.flatten_nodes()]
    assert kinds == [
        "ConstantText", "ConstantText", "Argument", "ConstantText", "Fork", "Variable",
        "VarScopeBegin", "Select", "VarScopeEnd",
    ]  # fmt: skip
    assert {"plan", "best", "end"} <= set(trace.variables)
    assert len(trace.child_states) == 2
    assert [type(n.expr).__name__ for n in trace.child_states[0].nodes] == [
        "GetForkItem", "ConstantText", "Gen", "ConstantText",
    ]  # fmt: skip
    listing = trace.last_node.print_graph_dfs()
    assert listing.count("Fork(number=2)") == 1
    assert "Gen('plan')" in listing


def test_trace_of_programs_that_call_programs():
    @sgl.function
    def inner(s, x):
        s += x + sgl.gen("y")

    @sgl.function
    def outer(s):
        inner("in")
        s += "out"

    trace = outer.trace()

    assert trace.flatten_nodes() == [ir.ConstantText("out")]
    assert [type(x) for x in trace.child_states[0].flatten_nodes()] == [ir.ConstantText, ir.Gen]


def test_trace_uses_the_backends_template():
    backend = sgl.Scripted()
    backend.chat_template = get_chat_template("chatml")

    @sgl.function
    def program(s):
        s += sgl.user("hi")

    assert program.trace(backend=backend).flatten_nodes()[0].value == "<|im_start|>user\n"
    assert backend.calls == []


def test_join_modes_are_traced():
    @sgl.function
    def program(s):
        forks = s.fork(2)
        forks += sgl.gen("x")
        forks.join("concate_and_append")

    trace = program.trace()
    assert type(trace.last_node.expr) is ir.ConcatenateAndAppend
    assert len(trace.last_node.sources()) == 3


def test_dot_has_every_node_and_edge():
    trace = sgl.function(tot).trace(question='a "quote"', n=2)
    dot = trace.to_dot()

    assert dot.count("[label=") == len(trace.graph.nodes)
    assert dot.count(" -> ") == sum(len(node.sources()) for node in trace.graph.nodes)
    assert '\\"quote\\"' in dot


def test_svg_is_well_formed_and_has_a_box_per_node():
    trace = sgl.function(tot).trace(question="<&>", n=3)

    root = ET.fromstring(trace.to_svg())

    boxes = [el for el in root if el.tag.endswith("rect")]
    assert len(boxes) == len(trace.graph.nodes)
    assert len({(box.get("x"), box.get("y")) for box in boxes}) == len(boxes)
