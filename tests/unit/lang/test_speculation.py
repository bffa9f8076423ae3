from __future__ import annotations

import pytest

from sylvan import lang as sgl
from sylvan.lang.speculation import find_stop


class Completion(sgl.Scripted):
    """Continues text; honours stops, and cuts at a limit of characters."""

    def generate(self, s, sampling_params):
        text, meta = super().generate(s, sampling_params)
        cut = text[: sampling_params.max_new_tokens]
        return cut, {**meta, "finish_reason": "stop" if cut == text else "length"}


def card(tokens):
    @sgl.function(num_api_spec_tokens=tokens)
    def program(s):
        s += "Name:" + sgl.gen("name", 12, stop="\n")
        s += "\nBorn:" + sgl.gen("born", 12, stop="\n") + "\nJob:" + sgl.gen("job", 12, stop="\n")

    return program


def rest(text):
    """The model: it always writes the same card."""
    whole = "Name: Ada\nBorn: 1815\nJob: maths\n"
    return whole[len(text) :] if whole.startswith(text) else "?"


@pytest.mark.parametrize(("tokens", "calls"), [(None, 3), (64, 1), (14, 3), (16, 2)])
def test_completion_speculation_saves_calls_and_changes_nothing(tokens, calls):
    backend = Completion(rest)

    state = card(tokens).run(backend=backend)

    assert (state["name"], state["born"], state["job"]) == (" Ada", " 1815", " maths")
    assert state.text() == "Name: Ada\nBorn: 1815\nJob: maths"
    assert len(backend.calls) == calls


def test_completion_speculation_drops_a_surplus_that_does_not_match():
    @sgl.function(num_api_spec_tokens=64)
    def program(s):
        s += "Name:" + sgl.gen("name", stop="\n") + "\nAge:" + sgl.gen("age", stop="\n")

    backend = Completion(lambda text: " 36\n" if text.endswith("Age:") else rest(text))
    state = program.run(backend=backend)

    assert state["age"] == " 36"


def test_completion_speculation_respects_token_limits():
    @sgl.function(num_api_spec_tokens=64)
    def program(s):
        s += sgl.gen("x", max_tokens=4)

    assert program.run(backend=Completion("a long answer"))["x"] == "a lo"


def chat_program(num_tokens=50):
    @sgl.function(num_api_spec_tokens=num_tokens)
    def program(s):
        s += sgl.user("Describe.")
        s += sgl.assistant(
            "Name:" + sgl.gen("name", stop="\n") + "\nJob:" + sgl.gen("job", stop=["!", "."])
        )

    return program


def test_chat_speculation_asks_once_per_message():
    backend = sgl.Scripted("Name: Ada\nJob: maths. And more", is_chat_model=True)

    state = chat_program().run(backend=backend)

    assert (state["name"], state["job"]) == (" Ada", " maths")
    assert state.text() == "USER:Describe.\nASSISTANT:Name: Ada\nJob: maths\n"
    assert [call.text for call in backend.calls] == ["USER:Describe.\nASSISTANT:"]
    assert backend.calls[0].params.max_new_tokens == 50
    assert backend.calls[0].params.to_protocol().stop == ()


def test_chat_speculation_tries_again_and_then_says_why():
    backend = sgl.Scripted(["nonsense", "Name: A\nJob: b."], is_chat_model=True)
    assert chat_program().run(backend=backend)["job"] == " b"

    backend = sgl.Scripted("nonsense", is_chat_model=True)
    with pytest.raises(sgl.ProgramError, match="nonsense"):
        chat_program().run(backend=backend)["job"]
    assert len(backend.calls) == 3


def test_chat_speculation_needs_one_set_of_parameters_per_message():
    @sgl.function(num_api_spec_tokens=50)
    def program(s):
        s += sgl.assistant(sgl.gen("a", temperature=0) + sgl.gen("b", temperature=1))

    with pytest.raises(sgl.ProgramError, match="same sampling parameters"):
        program.run(backend=sgl.Scripted(is_chat_model=True)).text()


def test_messages_without_gens_need_no_call():
    @sgl.function(num_api_spec_tokens=50)
    def program(s):
        s += sgl.assistant("Hello.")

    backend = sgl.Scripted(is_chat_model=True)
    assert program.run(backend=backend).text() == "ASSISTANT:Hello.\n"
    assert backend.calls == []


def test_streaming_and_speculation_exclude_each_other():
    state = card(8).run(backend=Completion(rest), stream=True)
    with pytest.raises(sgl.ProgramError, match="num_api_spec_tokens"):
        list(state.text_iter())


def test_find_stop_finds_the_earliest():
    assert find_stop("abcabc", ["c", "b"]) == 1
    assert find_stop("abc", ["x"]) == -1
    assert find_stop("abc", []) == -1
