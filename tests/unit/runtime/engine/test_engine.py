"""`sylvan.Engine` on a tiny model, all in this process."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import sylvan
from sylvan.kernels import describe
from sylvan.protocol.errors import CapacityError, ConfigError, RequestError
from sylvan.runtime.engine.engine import Engine
from tests.parity.checkpoints import write
from tests.parity.families import FALLBACK
from tests.support.tiny import CONTEXT, write_model

GREEDY = {"temperature": 0.0, "max_new_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with start(model) as engine:
        yield engine


def start(model: Path, **keywords: Any) -> Engine:
    known = {"load_format": "dummy", "device": "cpu", "threads": 1, "max_total_tokens": 4096}
    return Engine(model_path=str(model), **(known | keywords))


def test_the_package_exposes_it() -> None:
    assert sylvan.Engine is Engine


def test_one_prompt_gives_one_answer(engine: Engine) -> None:
    reply: Any = engine.generate("hello", GREEDY)

    assert set(reply) == {"text", "output_ids", "meta_info"}
    assert len(reply["output_ids"]) == 6
    meta = reply["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"]) == (5, 6)
    assert meta["e2e_latency"] > 0


def test_ids_and_text_are_the_same_prompt(engine: Engine) -> None:
    ids = engine.tokenizer.encode("hello")
    by_text: Any = engine.generate("hello", GREEDY)
    by_ids: Any = engine.generate(input_ids=ids, sampling_params=GREEDY)

    assert by_ids["output_ids"] == by_text["output_ids"]


def test_a_list_of_prompts_gives_a_list_in_order(engine: Engine) -> None:
    alone: list[Any] = [engine.generate(p, GREEDY) for p in ("a", "bb", "ccc")]
    batch: Any = engine.generate(("a", "bb", "ccc"), GREEDY)

    assert [r["output_ids"] for r in batch] == [r["output_ids"] for r in alone]


def test_samples_of_a_prompt_lie_side_by_side(engine: Engine) -> None:
    params = [{"n": 2, "max_new_tokens": k, "ignore_eos": True} for k in (3, 4)]
    replies: Any = engine.generate(["a", "b"], params)

    assert [len(r["output_ids"]) for r in replies] == [3, 3, 4, 4]


def test_a_stream_grows_to_the_whole_answer(engine: Engine) -> None:
    params = GREEDY | {"max_new_tokens": 300, "ignore_eos": True}
    whole: Any = engine.generate("hello", params)
    parts: list[Any] = list(engine.generate("hello", params, stream=True))

    lengths = [len(p["output_ids"]) for p in parts]  # a late reader gets several at once
    assert lengths == sorted(set(lengths))
    assert parts[0]["meta_info"]["finish_reason"] is None
    assert parts[-1]["output_ids"] == whole["output_ids"]
    assert parts[-1]["text"] == whole["text"]
    assert parts[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]


@pytest.mark.parametrize("more", [{}, {"stop": ["never"]}], ids=["plain", "stop"])
def test_tokens_are_emitted_together_unless_streamed(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    [client] = engine._runtime.manager.router.clients
    on_texts, on_message = client.on_texts, client.on_message
    texts: list[Any] = []
    beats: list[Any] = []
    monkeypatch.setattr(client, "on_texts", lambda m: (texts.append(m), on_texts(m)))
    monkeypatch.setattr(client, "on_message", lambda m: (beats.append(m), on_message(m)))

    reply: Any = engine.generate("hello", {**GREEDY, "max_new_tokens": 300, **more})

    assert len(reply["output_ids"]) == 300
    assert len(texts) <= 2 + len(beats)  # at the first token, at the end, and with each heartbeat


def test_a_stream_of_several_prompts_is_numbered(engine: Engine) -> None:
    last: dict[int, Any] = {}
    for part in engine.generate(["a", "b"], {**GREEDY, "n": 2}, stream=True):
        last[part["index"]] = part  # type: ignore[index]

    assert sorted(last) == [0, 1, 2, 3]
    whole: Any = engine.generate(["a", "b"], GREEDY)
    assert [last[i]["text"] for i in (0, 2)] == [r["text"] for r in whole]


def test_incremental_streams_are_pieces(model: Path, engine: Engine) -> None:
    whole: Any = engine.generate("hello", GREEDY)
    with start(model, incremental_streaming_output=True) as other:
        parts: list[Any] = list(other.generate("hello", GREEDY, stream=True))

    assert [i for p in parts for i in p["output_ids"]] == whole["output_ids"]
    assert "".join(p["text"] for p in parts) == whole["text"]


def test_a_stream_that_is_left_is_aborted(engine: Engine) -> None:
    stream: Any = engine.generate("hello", {**GREEDY, "max_new_tokens": 900}, stream=True)
    next(stream)
    stream.close()

    while not engine.flush_cache():
        pass
    assert engine.get_server_info()["load"]["num_used_tokens"] == 0


def test_log_probabilities_come_with_text(engine: Engine) -> None:
    reply: Any = engine.generate(
        "hello",
        GREEDY,
        return_logprob=True,
        logprob_start_len=0,
        top_logprobs_num=2,
        return_text_in_logprobs=True,
    )
    meta = reply["meta_info"]

    assert len(meta["input_token_logprobs"]) == 5
    assert meta["input_token_logprobs"][0][0] is None
    assert [entry[1] for entry in meta["output_token_logprobs"]] == reply["output_ids"]
    assert all(isinstance(entry[2], str) for entry in meta["output_token_logprobs"])
    assert all(len(tops) == 2 for tops in meta["output_top_logprobs"])


async def test_async_calls_work_on_the_callers_loop(engine: Engine) -> None:
    whole, other = await asyncio.gather(
        engine.async_generate("hello", GREEDY), engine.async_generate("other", GREEDY)
    )
    stream: Any = await engine.async_generate("hello", GREEDY, stream=True)
    parts = [part async for part in stream]

    assert parts[-1]["text"] == whole["text"]  # type: ignore[index,call-overload]
    assert other["text"] != whole["text"]  # type: ignore[index,call-overload]


async def test_cancelling_an_async_call_aborts_it(engine: Engine) -> None:
    params = {**GREEDY, "max_new_tokens": 900}
    task = asyncio.create_task(engine.async_generate("hello", params))
    while not await asyncio.to_thread(lambda: engine.get_server_info()["load"]["num_running_reqs"]):
        pass
    task.cancel()
    await asyncio.wait({task})

    while not await asyncio.to_thread(engine.flush_cache):
        pass


def test_scores_have_the_shape_of_sglangs(engine: Engine) -> None:
    fields = {"label_token_ids": [5, 6], "return_token_logprobs": True}
    result = engine.score("query", ["a", "bc"], **fields)

    assert [len(row) for row in result.scores] == [2, 2]
    assert result.prompt_tokens == len("querya") + len("querybc")
    assert result.token_logprobs is not None
    assert engine.score("query", ["a"], label_token_ids=[5]).token_logprobs is None


def test_refused_requests_are_value_errors(engine: Engine) -> None:
    with pytest.raises(ValueError, match="top_p"):
        engine.generate("hello", {"top_p": 7.0})
    with pytest.raises(ValueError, match="maximum context length") as caught:
        list(engine.generate("hello", {"max_new_tokens": 10**6}, stream=True))
    assert (caught.value.param, caught.value.code) == ("max_new_tokens", "context_length_exceeded")
    with pytest.raises(ValueError, match="items"):
        engine.score("query", [])
    with pytest.raises(ValueError, match="foo"):
        engine.rerank(query="q", documents=["a"], foo=1)


def test_threads_share_an_engine(engine: Engine) -> None:
    replies: list[Any] = []
    threads = [
        threading.Thread(target=lambda: replies.append(engine.generate("hello", GREEDY)))
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len({tuple(reply["output_ids"]) for reply in replies}) == 1
    assert len(replies) == 8


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"prompt": ""}, "text"),
        ({"prompt": "a", "sampling_params": {"temprature": 1.0}}, "temperature"),
        ({"prompt": "a", "sampling_params": {"top_p": 2.0}}, "top_p"),
        ({"input_ids": [999_999]}, "input_ids"),
        ({"prompt": "a", "no_such_field": 1}, "no_such_field"),
        ({}, "text"),
    ],
)
def test_bad_requests_name_the_field(
    engine: Engine, keywords: dict[str, Any], message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        engine.generate(**keywords)


def test_one_bad_prompt_of_a_batch_fails_the_call_and_nothing_else(engine: Engine) -> None:
    with pytest.raises(RequestError, match="tokens"):
        engine.generate(["fine", "x" * (CONTEXT + 100)], GREEDY)

    assert engine.generate("hello", GREEDY)
    assert engine.flush_cache()


def test_vectors_need_another_model(engine: Engine) -> None:
    with pytest.raises(RequestError, match="makes no embeddings"):
        engine.encode("a")


def test_unknown_keywords_are_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="page_siz"):
        start(model, cache__page_siz=4)


def test_a_model_that_is_not_there_is_one_sentence(tmp_path: Path) -> None:
    threads = set(threading.enumerate())
    with pytest.raises(ConfigError, match="nowhere"):
        Engine(model_path=str(tmp_path / "nowhere"))
    assert set(threading.enumerate()) <= threads


def test_after_shutdown_nothing_is_left(model: Path) -> None:
    before = set(threading.enumerate())
    engine = start(model)
    stream: Any = engine.generate("hello", {**GREEDY, "max_new_tokens": 900}, stream=True)
    next(stream)

    engine.shutdown()
    engine.shutdown()

    with pytest.raises(CapacityError, match="shut down"):
        engine.generate("hello")
    stream.close()
    assert set(threading.enumerate()) == before


def in_force(engine: Engine) -> tuple[object, object, str]:
    """Requested and effective settings, and the runner."""
    found = engine.get_server_info()
    facts = found["extra"]
    return found["config"]["deterministic"], facts["deterministic"], facts["runner"]


def test_deterministic_is_what_the_runner_keeps(engine: Engine, model: Path) -> None:
    compiled = describe().variant is not None

    wanted, kept, runner = in_force(engine)
    assert wanted is kept is compiled
    assert runner.startswith("program" if compiled else "eager")
    with start(model, runner="eager") as other:
        assert in_force(other) == (False, False, "eager")


@pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled")
def test_a_model_that_cannot_keep_the_bits_says_so_or_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write(FALLBACK["persimmon"](), 3, tmp_path)  # nothing but loading it tells

    with start(tmp_path, load_format="auto") as engine:
        wanted, kept, runner = in_force(engine)
    assert wanted is kept is False
    assert runner.startswith("eager")
    assert "deterministic=false: results of runner eager" in caplog.text
    with pytest.raises(ConfigError, match="deterministic=true cannot be kept: the model runs thro"):
        start(tmp_path, load_format="auto", deterministic=True)


@pytest.mark.parametrize(
    ("fields", "params"),
    [({"max_thinking_tokens": 3}, {}), ({"require_reasoning": True}, {"regex": "a"})],
    ids=lambda x: next(iter(x), ""),
)
def test_thinking_is_refused_where_nothing_follows_it(
    model: Path, fields: dict[str, Any], params: dict[str, Any]
) -> None:
    with start(model, reasoning_parser="none") as engine, pytest.raises(RequestError) as caught:
        engine.generate("a", params, **fields)

    assert caught.value.param == next(iter(fields))


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_thinking_are_counted(model: Path, stream: bool) -> None:
    thought = "<think>ab</think>"
    wanted = {"regex": f"{thought}cd", "max_new_tokens": 40}
    with start(model, reasoning_parser="qwen3") as engine:
        found: Any = engine.generate("x", wanted, stream=stream)
        counts = [r["meta_info"]["reasoning_tokens"] for r in (found if stream else [found])]
        num_tokens = len(engine.tokenizer.encode(thought, add_special_tokens=False))
        plain: Any = engine.generate("x", {"regex": "cd"})
        opened: Any = engine.generate("x<think>", {"regex": "ab</think>cd", "max_new_tokens": 40})

    assert counts[-1] == num_tokens
    assert counts == sorted(counts)
    assert plain["meta_info"]["reasoning_tokens"] == 0
    assert opened["meta_info"]["reasoning_tokens"] == num_tokens - 1


def test_no_tokens_tell_what_may_come_next(engine: Engine) -> None:
    wanted: dict[str, Any] = {
        "return_logprob": True, "top_logprobs_num": 3, "token_ids_logprob": [5, 6],
    }  # fmt: skip
    one: Any = engine.generate("next", {**GREEDY, "max_new_tokens": 1}, **wanted)
    none: Any = engine.generate("next", {**GREEDY, "max_new_tokens": 0}, **wanted)

    assert (none["text"], none["output_ids"]) == ("", [])
    assert none["meta_info"]["completion_tokens"] == 0
    assert none["meta_info"]["output_token_logprobs"] == []
    for name in ("output_top_logprobs", "output_token_ids_logprobs"):
        assert len(none["meta_info"][name]) == 1
        assert none["meta_info"][name] == one["meta_info"][name]


def test_turns_of_a_session_continue_from_each_other(engine: Engine) -> None:
    name = engine.open_session(1000)
    first: Any = engine.generate("one", GREEDY, session_params={"id": name}, rid="a")
    going_on = {"id": name, "rid": "a"}
    second: Any = engine.generate("two", GREEDY, session_params=going_on, stream=True)
    second = list(second)[-1]
    ids = [*engine.tokenizer.encode("one"), *first["output_ids"], *engine.tokenizer.encode("two")]
    alone: Any = engine.generate(input_ids=ids, sampling_params=GREEDY)

    assert second["output_ids"] == alone["output_ids"]
    engine.close_session(name)
    with pytest.raises(RequestError, match="there is no session"):
        engine.generate("x", session_params={"id": name})


def test_a_budget_ends_thinking(model: Path) -> None:
    params = {"regex": "<think>[ab]{8}</think>c", "max_new_tokens": 60, "temperature": 0.0}
    with start(model, reasoning_parser="qwen3") as engine:
        free: Any = engine.generate("x<think>", {**GREEDY, "max_new_tokens": 40})
        bound: Any = engine.generate(
            "x<think>", {**GREEDY, "max_new_tokens": 40}, max_thinking_tokens=3
        )
        assert engine.generate("x", params)

    end = engine.tokenizer.encode("</think>", add_special_tokens=False)
    assert bound["output_ids"][3 : 3 + len(end)] == end
    assert free["output_ids"][3 : 3 + len(end)] != end
    assert bound["meta_info"]["reasoning_tokens"] == 3 + len(end)


def test_names_without_a_meaning_here_say_why(engine: Engine) -> None:
    with pytest.raises(AttributeError, match="ranks take commands"):
        engine.collective_rpc  # noqa: B018
    with pytest.raises(AttributeError, match=r"has no 'foo'$"):
        engine.foo  # noqa: B018


def test_arguments_can_be_passed_around(model: Path) -> None:
    with pytest.raises(ConfigError, match="page_siz"):
        sylvan.ServerArgs(cache__page_siz=4)
    args = sylvan.ServerArgs(
        model_path=str(model), load_format="dummy", device="cpu", threads=1, max_total_tokens=4096
    )
    with Engine(server_args=args) as other:
        assert other.generate("hello", GREEDY)
        other.freeze_gc()


def test_steps_are_profiled(engine: Engine, tmp_path: Path) -> None:
    assert engine.start_profile(str(tmp_path)) == str(tmp_path)
    engine.generate("hello", GREEDY)

    assert all(Path(file).exists() for file in engine.stop_profile())
