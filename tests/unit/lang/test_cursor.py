from __future__ import annotations

import asyncio
import threading

import pytest

from sylvan import lang as sgl


@sgl.function
def chat(s):
    s += sgl.user("hi")
    s += sgl.assistant(sgl.gen("x"))
    s += sgl.gen("y")


class Steps:
    """A stream whose pieces the test lets through one by one."""

    def __init__(self, *pieces):
        self.pieces, self.go = pieces, threading.Semaphore(0)


class SteppedBackend(sgl.Scripted):
    def __init__(self, steps):
        super().__init__()
        self.steps = steps

    def generate_stream(self, s, sampling_params):
        for i, piece in enumerate(self.steps.pieces):
            assert self.steps.go.acquire(timeout=10)
            yield piece, {"completion_tokens": i + 1}


def test_text_arrives_before_the_program_ends():
    steps = Steps("a", "b")

    @sgl.function
    def program(s):
        s += "p" + sgl.gen("x") + "e"

    state = program.run(backend=SteppedBackend(steps), stream=True)
    pieces = state.text_iter()

    assert next(pieces) == "p"
    steps.go.release()
    assert next(pieces) == "a"
    steps.go.release()
    assert "".join(pieces) == "be"
    assert state["x"] == "ab"


def test_a_variable_is_read_by_itself():
    state = chat.run(backend=sgl.Scripted(["abcdefg", "z"]), stream=True)
    assert "".join(state.text_iter("x")) == "abcdefg"
    assert "".join(state.text_iter("y")) == "z"
    assert "".join(state.text_iter()) == "USER:hi\nASSISTANT:abcdefg\nz"


def test_without_streaming_there_is_one_piece():
    state = chat.run(backend=sgl.Scripted(["abcdefg", "z"]))
    assert list(state.text_iter()) == ["USER:hi\nASSISTANT:abcdefg\nz"]
    assert list(state.text_iter("x")) == ["abcdefg"]
    with pytest.raises(KeyError):
        list(state.text_iter("no"))


def test_unknown_variable_of_a_stream_ends_with_the_program():
    state = chat.run(backend=sgl.Scripted(), stream=True)
    assert list(state.text_iter("no")) == []


def test_errors_come_after_the_pieces_before_them():
    class Breaking(sgl.Scripted):
        def generate_stream(self, s, sampling_params):
            yield "half", {}
            raise OSError("gone")

    state = chat.run(backend=Breaking(), stream=True)
    seen = []

    with pytest.raises(sgl.ProgramError, match="gone"):
        seen.extend(state.text_iter())
    state = chat.run(backend=Breaking(), stream=True)
    pieces = state.text_iter("x")
    assert next(pieces) == "half"
    with pytest.raises(sgl.ProgramError, match="gone"):
        next(pieces)


def test_what_a_streaming_program_raises_reaches_the_reader():
    @sgl.function
    def program(s):
        s += "a"
        raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        list(program.run(backend=sgl.Scripted(), stream=True).text_iter())


async def test_async_iteration_does_not_block_the_loop():
    steps = Steps("a", "b")
    state = chat.run(backend=SteppedBackend(steps), stream=True)
    pieces = []

    async def read():
        async for piece, meta in state.text_async_iter("x", return_meta_data=True):
            pieces.append((piece, meta["completion_tokens"]))

    reader = asyncio.create_task(read())
    for _ in range(5):
        await asyncio.sleep(0)
    assert pieces == []
    for _ in range(4):
        steps.go.release()
    await reader

    assert "".join(piece for piece, _ in pieces) == "ab"
    assert pieces[-1][1] == 2
    await state.async_sync()


async def test_async_run_of_plain_and_async_programs():
    @sgl.function
    async def program(s, q):
        s += q + sgl.gen("x")
        first = await s.async_get_var("x")
        s += f"<{first}>"

    @sgl.function
    def plain(s):
        s += sgl.gen("x")

    backend = sgl.Scripted("a")
    states = await asyncio.gather(
        program.async_run("q", backend=backend),
        program.async_run(q="r", backend=backend),
        plain.async_run(backend=backend),
    )

    assert [state.text() for state in states] == ["qa<a>", "ra<a>", "a"]
    async for text in states[0].text_async_iter():
        assert text == "qa<a>"


def test_async_programs_run_from_plain_code_too():
    @sgl.function
    async def program(s):
        s += sgl.gen("x")
        return await s.async_get_var("x")

    assert program.run(backend=sgl.Scripted("a")).ret_value == "a"


async def test_async_errors_reach_the_caller():
    def answer(text):
        raise OSError("down")

    @sgl.function
    async def program(s):
        s += sgl.gen("x")
        await s.async_get_var("x")

    with pytest.raises(sgl.ProgramError, match="down"):
        await program.async_run(backend=sgl.Scripted(answer))


def test_several_samples_of_a_stream_make_a_list():
    @sgl.function
    def program(s):
        s += sgl.gen("x", n=2) + "."

    state = program.run(backend=sgl.Scripted(["abcd", "efgh"]), stream=True)

    assert "".join(state.text_iter()) == "abcd."
    assert state["x"] == ["abcd", "efgh"]


def test_reasoning_of_a_stream_is_separated_at_the_end():
    @sgl.function
    def program(s):
        s += sgl.separate_reasoning(sgl.gen("x"), model_type="qwen3")

    state = program.run(backend=sgl.Scripted("<think>a</think>b"), stream=True)

    assert "".join(state.text_iter()) == "<think>a</think>b"
    assert (state["x"], state["x_reasoning_content"]) == ("b", "a")
