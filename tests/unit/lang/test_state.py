# ruff: noqa: PLW2901 - `state += ...` is how programs append
from __future__ import annotations

import threading

import pytest

from sylvan import lang as sgl
from sylvan.lang import ir
from sylvan.lang.chat_templates import get_chat_template


def test_roles_are_spelt_and_become_messages():
    @sgl.function
    def program(s, question):
        s += sgl.system("Be brief.")
        s += sgl.user(question)
        s += sgl.assistant("So: " + sgl.gen("answer"))

    state = program.run("Why?", backend=sgl.Scripted("because"))

    assert state.text() == "SYSTEM:Be brief.\nUSER:Why?\nASSISTANT:So: because\n"
    assert state.messages() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": "So: because"},
    ]
    assert state["answer"] == "because"


def test_default_system_prompt_comes_first():
    backend = sgl.Scripted()
    backend.chat_template = get_chat_template("qwen")

    @sgl.function
    def program(s):
        s += sgl.user("hi")

    state = program.run(backend=backend)

    assert state.messages()[0] == {"role": "system", "content": "You are a helpful assistant."}
    assert state.text().startswith("<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n")


def test_role_blocks_and_begin_end_are_the_same_as_calls():
    @sgl.function
    def blocks(s):
        with s.user():
            s += "a"
            s += "b"
        with s.assistant():
            s += sgl.gen("x")

    @sgl.function
    def pieces(s):
        s += sgl.user_begin() + "ab" + sgl.user_end()
        s += sgl.assistant_begin()
        s += sgl.gen("x")
        s += sgl.assistant_end()

    @sgl.function
    def methods(s):
        s.user("ab")
        s.assistant(sgl.gen("x"))

    texts = [p.run(backend=sgl.Scripted("ok")).text() for p in (blocks, pieces, methods)]
    assert texts == ["USER:ab\nASSISTANT:ok\n"] * 3


def test_nested_roles_are_refused_with_the_line():
    @sgl.function
    def program(s):
        with s.user():
            s += sgl.assistant("no")

    state = program.run(backend=sgl.Scripted())

    assert isinstance(state.error(), sgl.ProgramError)
    assert 's += sgl.assistant("no")' in str(state.error())


def test_lists_are_appended_item_by_item():
    @sgl.function
    def program(s):
        s += ["a", sgl.gen("x"), ("b", "c")]

    assert program.run(backend=sgl.Scripted("-")).text() == "a-bc"


def test_appending_none_or_a_number_fails_at_once():
    @sgl.function
    def program(s, value):
        s += value

    with pytest.raises(ValueError, match="None"):
        program.run(None, backend=sgl.Scripted())
    with pytest.raises(TypeError, match="int"):
        program.run(3, backend=sgl.Scripted())


def test_var_scope_binds_the_text_inside():
    @sgl.function
    def program(s):
        s += "before "
        with s.var_scope("middle"):
            s += "a" + sgl.gen("x")
        s += " after"

    state = program.run(backend=sgl.Scripted("b"))
    assert state["middle"] == "ab"


def test_variables_can_be_set_asked_for_and_missing():
    @sgl.function
    def program(s):
        s["given"] = 3
        s += sgl.gen("x")

    state = program.run(backend=sgl.Scripted())
    assert state["given"] == 3
    assert "x" in state
    assert "y" not in state
    assert state.get_meta_info("x")["finish_reason"] == {"type": "stop"}
    assert state.get_meta_info("y") is None
    with pytest.raises(KeyError):
        state["y"]


def test_reading_waits_for_the_latest_gen_of_that_name():
    @sgl.function
    def program(s):
        seen = []
        for _ in range(3):
            s += sgl.gen("x")
            seen.append(s["x"])
        return seen

    assert program.run(backend=sgl.Scripted(["a", "b", "c"])).ret_value == ["a", "b", "c"]


def test_forks_share_the_prefix_which_is_committed_once():
    backend = sgl.Scripted(lambda text: text[-1] * 2)

    @sgl.function
    def program(s):
        s += "prefix "
        forks = s.fork(3)
        forks += lambda i: f"{i}"
        forks += sgl.gen("x")
        forks.join()
        s += " ".join(s["x"])

    state = program.run(backend=backend)

    assert state["x"] == ["00", "11", "22"]
    assert state.text() == "prefix 00 11 22"
    assert [call.text for call in backend.calls if call.kind == "commit"] == ["prefix "]
    assert sorted(c.text for c in backend.calls if c.kind == "generate") == [
        "prefix 0", "prefix 1", "prefix 2",
    ]  # fmt: skip


def test_single_fork_or_empty_text_commits_nothing():
    backend = sgl.Scripted()

    @sgl.function
    def program(s):
        s.fork(2).join()
        s += "x"
        with s.copy() as copy:
            copy += sgl.gen("y")
        return s["y"]

    state = program.run(backend=backend)

    assert state.ret_value == ["ok"]
    assert state.text() == "x"
    assert [call.kind for call in backend.calls] == ["generate"]


def test_forks_run_at_the_same_time():
    meet = threading.Barrier(4, timeout=10)

    def answer(text):
        meet.wait()
        return "met"

    @sgl.function
    def program(s):
        forks = s.fork(4)
        forks += sgl.gen("x")
        forks.join()

    assert program.run(backend=sgl.Scripted(answer))["x"] == ["met"] * 4


def test_join_can_append_the_forks_texts():
    @sgl.function
    def program(s):
        s += "p"
        forks = s.fork(2)
        forks += ["a", "b"]
        forks += sgl.gen("x")
        forks.join("concate_and_append")

    state = program.run(backend=sgl.Scripted("!"))
    assert state.text() == "pa!b!"
    assert "x" not in state


def test_join_refuses_unknown_modes_and_wrong_lengths():
    @sgl.function
    def program(s):
        s.fork(2).join("both")

    with pytest.raises(ValueError, match="gather_variable"):
        program.run(backend=sgl.Scripted())

    @sgl.function
    def short(s):
        forks = s.fork(2)
        forks += ["a"]

    with pytest.raises(ValueError, match="1 items"):
        short.run(backend=sgl.Scripted())


def test_groups_are_indexed_and_changed_in_place():
    @sgl.function
    def program(s):
        forks = s.fork(2)
        forks[0] += "left" + sgl.gen("x")
        for fork in forks:
            fork += "."
        assert len(forks) == 2
        with pytest.raises(ValueError, match="replaced"):
            forks[0] = s
        return [fork.text() for fork in forks]

    assert program.run(backend=sgl.Scripted("-")).ret_value == ["left-.", "."]


def test_a_failing_fork_fails_the_join_and_only_its_program():
    def answer(text):
        if text.endswith("1"):
            raise ConnectionError("lost")
        return "fine"

    @sgl.function
    def program(s):
        forks = s.fork(2)
        forks += lambda i: f"{i}"
        forks += sgl.gen("x")
        forks.join()

    with pytest.raises(sgl.ProgramError, match="lost") as caught:
        program.run(backend=sgl.Scripted(answer))
    assert isinstance(caught.value.__cause__, ConnectionError)


def test_several_samples_make_a_list_and_the_first_continues():
    @sgl.function
    def program(s):
        s += sgl.gen("x", n=3) + "|"

    state = program.run(backend=sgl.Scripted(["a", "b", "c"]))

    assert state["x"] == ["a", "b", "c"]
    assert state.text() == "a|"
    assert len(state.get_meta_info("x")) == 3


def test_select_appends_and_binds_the_best_choice():
    scores = {"yes": -2.0, "no": -1.0}

    @sgl.function
    def program(s):
        s += "Is it? " + sgl.select("a", ["yes", "no"])
        s += sgl.gen("b", choices=["no", "yes"], choices_method=sgl.greedy_token_selection)

    state = program.run(backend=sgl.Scripted(score=lambda prompt, choice: scores[choice]))

    assert (state["a"], state["b"]) == ("no", "no")
    assert state.text() == "Is it? nono"
    assert state.get_meta_info("a")["normalized_prompt_logprobs"] == [-2.0, -1.0]


def test_variables_of_other_states_can_be_appended():
    @sgl.function
    def program(s):
        with s.copy() as other:
            other += sgl.gen("x")
            s += ir.Variable("x", other)

    assert program.run(backend=sgl.Scripted("v")).text() == "v"


def test_reasoning_moves_to_its_own_variable():
    @sgl.function
    def program(s):
        s += sgl.user("q")
        with s.assistant():
            s += "A: "
            s += sgl.separate_reasoning(sgl.gen("x"), model_type="qwen3")
            s += " end"

    state = program.run(backend=sgl.Scripted("<think>hm</think>yes"))

    assert state["x"] == "yes"
    assert state["x_reasoning_content"] == "hm"
    assert state.text() == "USER:q\nASSISTANT:A: yes end\n"
    assert state.messages()[-1]["content"] == "A: yes end"


def test_reasoning_of_several_gens_is_separated_each():
    @sgl.function
    def program(s):
        s += sgl.separate_reasoning(sgl.gen("x") + ", " + sgl.gen("y"), model_type="qwen3")

    state = program.run(
        backend=sgl.Scripted(["<think>1</think>a", "<think>22</think>b"]), use_thread=False
    )

    assert (state["x"], state["y"]) == ("a", "b")
    assert (state["x_reasoning_content"], state["y_reasoning_content"]) == ("1", "22")
    assert state.text() == "a, b"


def test_unknown_reasoning_parser_is_an_error():
    @sgl.function
    def program(s):
        s += sgl.separate_reasoning(sgl.gen("x"), model_type="no-such")

    with pytest.raises(sgl.ProgramError, match="no-such"):
        program.run(backend=sgl.Scripted("a")).text()


def test_images_add_the_token_and_a_content_part(tmp_path):
    picture = tmp_path / "p.png"
    picture.write_bytes(b"png")

    @sgl.function
    def program(s):
        s += sgl.user(sgl.image(str(picture)) + "What is it?")
        s += sgl.assistant(sgl.gen("x"))

    state = program.run(backend=sgl.Scripted("a picture"))

    assert "USER:<image>What is it?" in state.text()
    content = state.messages()[0]["content"]
    assert content[0] == {"type": "text", "text": "<image>What is it?"}
    assert content[1]["image_url"]["url"] == "data:image/jpeg;base64,cG5n"


def test_programs_can_call_programs():
    @sgl.function
    def inner(s, x):
        s += x + sgl.gen("y")

    @sgl.function
    def outer(s):
        s += inner.run("in ", backend=backend)["y"]
        s += sgl.gen("z")

    backend = sgl.Scripted(["a", "b"])
    assert outer.run(backend=backend).text() == "ab"


def test_print_of_a_state_shows_its_text():
    @sgl.function
    def program(s):
        s += "text"

    assert repr(program.run(backend=sgl.Scripted())) == "ProgramState('text')"
