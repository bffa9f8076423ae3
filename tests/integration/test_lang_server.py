"""Programs on a real server and on an engine in this process, with a tiny random model."""

from __future__ import annotations

import importlib.util
import json
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import sylvan as sgl
from sylvan.lang.backends.engine import EngineBackend
from tests.support.audits import assert_nothing_lost, assert_server_lost_nothing
from tests.support.tiny import CONTEXT, ENDLESS, write_model

SERVE = {"load_format": "dummy", "device": "cpu", "dtype": "float32", "threads": 1}
EXAMPLES = Path(__file__).parents[2] / "examples" / "lang"
SAPLING = Path(sgl.__file__).parent / "assets" / "sapling"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def runtime(model: Path) -> Iterator[sgl.Runtime]:
    with sgl.Runtime(model_path=str(model), launch_timeout=120, **SERVE) as runtime:
        yield runtime
        assert_server_lost_nothing(runtime.url)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[EngineBackend]:
    backend = EngineBackend(sgl.Engine(model_path=str(model), **SERVE))
    yield backend
    assert_nothing_lost(backend.get_server_info()["load"])
    backend.shutdown()


@pytest.fixture(params=["http", "engine"])
def backend(request: pytest.FixtureRequest):
    if request.param == "http":
        return request.getfixturevalue("runtime").endpoint
    return request.getfixturevalue("engine")


@sgl.function
def story(s, start):
    s += sgl.user(start)
    s += sgl.assistant(sgl.gen("first", max_tokens=12))
    forks = s.fork(3)
    forks += lambda i: f"Way {i}: "
    forks += sgl.gen("way", max_tokens=8)
    forks.join()
    s += "|".join(s["way"]) + sgl.gen("last", max_tokens=6)


def test_server_and_engine_give_the_same_program_the_same_text(runtime, engine):
    over_http = story.run("Hello", backend=runtime, temperature=0)
    again = story.run("Hello", backend=runtime, temperature=0)
    inside = story.run("Hello", backend=engine, temperature=0)

    assert over_http.error() is None
    assert over_http.text() == again.text() == inside.text()
    assert len(over_http["way"]) == 3


def test_forks_find_their_prefix_in_the_cache(backend):
    cached = []

    @sgl.function
    def program(s):
        s += "A prefix of its own that is far longer than a page of the cache: " * 3
        forks = s.fork(4)
        forks += lambda i: f"{i}"
        forks += sgl.gen("x", max_tokens=1)
        forks.join()
        cached.extend(fork.get_meta_info("x")["cached_tokens"] for fork in forks)

    program.run(backend=backend, temperature=0)

    assert min(cached) >= 160


def test_streams_bring_what_a_plain_run_brings(backend):
    plain = story.run("Stream", backend=backend, temperature=0)
    stream = story.run("Stream", backend=backend, temperature=0, stream=True)

    assert "".join(stream.text_iter()) == plain.text()
    assert stream["first"] == plain["first"]


def test_samples_seeds_and_stops(backend):
    @sgl.function
    def program(s):
        s += "Begin" + sgl.gen("x", n=3, max_tokens=6, sampling_seed=5, ignore_eos=True)

    first, second = (program.run(backend=backend, temperature=1.0) for _ in range(2))
    assert first["x"] == second["x"]
    assert len(set(first["x"])) > 1

    letter = next(c for c in first["x"][0] if c.isascii() and c.isprintable())

    @sgl.function
    def stopped(s):
        s += "Begin" + sgl.gen("x", max_tokens=6, sampling_seed=5, stop=letter, ignore_eos=True)

    assert letter not in stopped.run(backend=backend, temperature=1.0)["x"]


needs_grammar = pytest.mark.skipif(
    importlib.util.find_spec("sylvan.runtime.features.grammar") is None,
    reason="the runtime has no grammars yet",
)


@needs_grammar
@pytest.mark.parametrize(
    ("options", "pattern"),
    [
        ({"regex": "(red|blue){2}"}, "(red|blue){2}"),
        ({"dtype": bool}, "True|False"),
        ({"dtype": int, "max_tokens": 4}, r"[-+]?[0-9]*"),
        ({"dtype": float, "max_tokens": 4}, r"[-+]?[0-9]*\.?[0-9]*"),
    ],
)
def test_constrained_gens_keep_to_their_form(backend, options, pattern):
    @sgl.function
    def program(s):
        s += "Say " + sgl.gen("x", **({"max_tokens": 16} | options))

    state = program.run(backend=backend)
    assert state.error() is None
    assert re.fullmatch(pattern, state["x"])


@needs_grammar
def test_json_schema_is_kept_to(backend):
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    schema["additionalProperties"] = False

    @sgl.function
    def program(s):
        s += "JSON: " + sgl.gen("x", max_tokens=200, json_schema=json.dumps(schema))

    assert json.loads(program.run(backend=backend, temperature=0)["x"])["ok"] in (True, False)


@pytest.mark.parametrize(
    "method",
    [
        sgl.token_length_normalized,
        sgl.greedy_token_selection,
        sgl.unconditional_likelihood_normalized,
    ],
)
def test_select_scores_are_those_of_the_whole_text(backend, method):
    prompt, choices = "The sky is ", ["blue", "deep red", "b"]

    @sgl.function
    def program(s):
        s += prompt + sgl.select("x", choices, choices_method=method)

    state = program.run(backend=backend)

    assert state["x"] in choices
    for choice, rows in zip(choices, state.get_meta_info("x")["input_token_logprobs"], strict=True):
        body = {"text": prompt + choice, "return_logprob": True, "logprob_start_len": 0}
        whole = backend.send({**body, "sampling_params": {"max_new_tokens": 0}})
        tail = whole["meta_info"]["input_token_logprobs"][-len(choice) :]  # a byte is a token
        assert len(rows) == len(choice)
        assert [row[1] for row in rows] == [row[1] for row in tail]
        assert [row[0] for row in rows] == pytest.approx([row[0] for row in tail], abs=1e-5)


def test_refusals_name_the_line_and_leave_the_server_well(backend):
    @sgl.function
    def program(s, text):
        s += text + sgl.gen("x", max_tokens=4)

    state = program.run("x" * (CONTEXT + 100), backend=backend)
    with pytest.raises(sgl.ProgramError, match="s \\+= text"):
        state["x"]
    assert program.run("short", backend=backend).error() is None


def test_cancelled_programs_stop_on_the_server(backend):
    @sgl.function
    def program(s):
        s += "On and on: " + sgl.gen("x", max_tokens=ENDLESS, ignore_eos=True, sampling_seed=1)

    state = program.run(backend=backend, stream=True)
    next(state.text_iter("x"))
    state.cancel()

    with pytest.raises(sgl.ProgramCancelledError):
        state["x"]
    deadline = time.monotonic() + 30
    while not is_idle(backend):
        assert time.monotonic() < deadline
        threading.Event().wait(0.05)


def is_idle(backend):
    """Whether no request runs: only then can the cache be flushed."""
    try:
        return backend.flush_cache() is not False
    except sgl.BackendError:
        return False


def test_a_batch_of_programs(backend):
    @sgl.function
    def program(s, i):
        s += f"{i}: " + sgl.gen("x", max_tokens=3)

    states = program.run_batch([{"i": i} for i in range(48)], backend=backend, temperature=0)
    alone = program.run(7, backend=backend, temperature=0)

    assert all(state.error() is None for state in states)
    assert states[7].text() == alone.text()


def load(name):
    spec = importlib.util.spec_from_file_location(f"served_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name",
    ["few_shot", "multi_turn", "self_consistency", "tree_of_thought", "tip_expansion", "llm_judge",
     "rag", pytest.param("react", marks=needs_grammar)],
)  # fmt: skip
def test_examples_run_on_the_server(runtime, name):
    sgl.set_default_backend(runtime)
    try:
        assert load(name).run() is not None
    finally:
        sgl.set_default_backend(None)


def test_openai_backend_on_our_own_server(runtime):
    pytest.importorskip("openai")
    backend = sgl.OpenAI(
        "default", is_chat_model=True, base_url=runtime.url + "/v1", api_key="none"
    )

    @sgl.function
    def chat(s):
        s += sgl.user("Hello")
        s += sgl.assistant(sgl.gen("x", max_tokens=8))

    try:
        plain = chat.run(backend=backend, temperature=0)
        stream = chat.run(backend=backend, temperature=0, stream=True)
        assert plain.error() is None
        assert "".join(stream.text_iter("x")) == plain["x"]
        assert backend.token_usage.completion_tokens >= 8
    finally:
        backend.client.close()


def test_anthropic_backend_on_our_own_server(runtime):
    pytest.importorskip("anthropic")
    backend = sgl.Anthropic("default", base_url=runtime.url, api_key="none")

    @sgl.function
    def chat(s):
        s += sgl.user("Hello")
        s += sgl.assistant(sgl.gen("x", max_tokens=8, temperature=0))

    try:
        plain = chat.run(backend=backend)
        assert plain.error() is None
        stream = chat.run(backend=backend, stream=True)
        assert "".join(stream.text_iter("x")) == plain["x"]
    finally:
        backend.client.close()


def test_runtime_helpers(runtime):
    answer = json.loads(runtime.generate("Hi", {"max_new_tokens": 2, "temperature": 0}))
    assert answer["meta_info"]["completion_tokens"] == 2
    runtime.cache_prefix("Hi there")
    assert runtime.pid is not None
    assert sgl.get_server_info(runtime)["version"]
    sgl.flush_cache(runtime)


async def test_runtime_async_generate(runtime):
    pieces = [
        piece
        async for piece in runtime.async_generate("Hi", {"max_new_tokens": 4, "temperature": 0})
    ]
    whole = json.loads(runtime.generate("Hi", {"max_new_tokens": 4, "temperature": 0}))
    assert "".join(pieces) == whole["text"]
    assert (await runtime.get_server_info())["version"]


def test_runtime_that_cannot_start_says_so(tmp_path):
    with pytest.raises(sgl.BackendError, match="exit code"):
        sgl.Runtime(model_path=str(tmp_path), launch_timeout=60)


@pytest.mark.skipif(
    not list(SAPLING.glob("*.safetensors")), reason="the built-in model has no weights here"
)
class TestBuiltInModel:
    """Answers that need a trained model."""

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def served(cls):
        with sgl.Runtime(launch_timeout=120) as runtime:
            sgl.set_default_backend(runtime)
            yield runtime
            sgl.set_default_backend(None)

    def test_json_extraction(self):
        first, second = load("json_extraction").run()
        assert (first["name"], first["age"]) == ("Maria", 31)
        assert second["age"] == 45

    def test_multi_turn_remembers(self):
        answers = load("multi_turn").run()
        assert "42" in answers[1]
        assert "Ada" in answers[2]

    def test_reasoning_is_separated(self):
        @sgl.function
        def program(s):
            s += sgl.user("What is 12 + 30?")
            s += sgl.assistant(sgl.separate_reasoning(sgl.gen("x", 128), model_type="qwen3"))

        state = program.run(temperature=0)
        assert "42" in state["x"]
        assert "<think>" not in state.text()
