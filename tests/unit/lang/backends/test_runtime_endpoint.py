"""Requests of the runtime's protocol, against a server that scores words as tokens."""

from __future__ import annotations

import re

import pytest

from sylvan import lang as sgl
from sylvan.lang.backends.engine import EngineBackend
from tests.support.wire import Events, Status, serving

WORD = re.compile(r"\S+|\s+")


class Model:
    """Words are tokens; every word has a fixed log probability; answers come from a script."""

    def __init__(self, answers=("ok",), logprobs=None, healed=()):
        self.answers = list(answers)
        self.logprobs = logprobs or {}
        self.healed = healed  # pairs of tokens that are one token when they meet
        self.ids: dict[str, int] = {}

    def tokens(self, text):
        words = WORD.findall(text)
        for a, b in self.healed:
            for i in range(len(words) - 1):
                if words[i : i + 2] == [a, b]:
                    words[i : i + 2] = [a + b]
        return words

    def generate(self, body):
        if isinstance(body.get("text"), list):
            return [self.one({**body, "text": text}) for text in body["text"]]
        if "input_ids" in body:
            words = {i: word for word, i in self.ids.items()}
            texts = [[words[i] for i in row] for row in body["input_ids"]]
            return [self.scored(row, 0, body) for row in texts]
        n = body["sampling_params"].get("n", 1)
        return [self.one(body) for _ in range(n)] if n > 1 else self.one(body)

    def one(self, body):
        tokens = self.tokens(body["text"])
        if body["sampling_params"].get("max_new_tokens") == 0:
            return self.scored(tokens, body.get("logprob_start_len", 0), body)
        answer = self.answers.pop(0)
        return {"text": answer, "meta_info": {"prompt_tokens": len(tokens), "id": "r"}}

    def scored(self, tokens, start, body):
        meta = {"prompt_tokens": len(tokens), "output_token_logprobs": []}
        if body.get("return_logprob"):
            rows = []
            for i, token in enumerate(tokens[start:]):
                self.ids.setdefault(token, len(self.ids) + 10)
                logprob = None if i == 0 else self.logprobs.get(token, -1.0)
                text = token if body.get("return_text_in_logprobs") else None
                rows.append([logprob, self.ids[token], text])
            meta["input_token_logprobs"] = rows
        return {"text": "", "meta_info": meta}

    def __call__(self, asked):
        if asked.path == "/get_model_info":
            return {"model_path": "org/llama-3-8b-instruct"}
        if asked.path == "/generate":
            if asked.body.get("stream"):
                return self.stream(asked.body)
            return self.generate(asked.body)
        return {"path": asked.path, "method": asked.method}

    def stream(self, body):
        n = body["sampling_params"]["n"]
        events = []
        for index in range(n):
            text = self.answers.pop(0)
            for end in range(1, len(text) + 1):
                chunk = {"text": text[:end], "meta_info": {"completion_tokens": end}}
                events.append((None, {**chunk, "index": index} if n > 1 else chunk))
        return Events(events)


@sgl.function
def program(s, question):
    s += question + sgl.gen("x", max_tokens=9, stop="\n", return_logprob=True)


def run(model, prog, *args, template="default", **kwargs):
    with serving(model) as server:
        backend = sgl.RuntimeEndpoint(server.url, chat_template_name=template)
        state = prog.run(*args, backend=backend, **kwargs)
        state.sync()
        list(state.text_iter()) if kwargs.get("stream") else None
        backend.shutdown()
    return state, server


def test_constructor_asks_for_the_model_and_picks_its_template():
    with serving(Model()) as server:
        backend = sgl.RuntimeEndpoint(server.url)
        assert backend.get_model_name() == "org/llama-3-8b-instruct"
        assert backend.get_chat_template().name == "llama-3-instruct"
        backend.shutdown()
    assert [(a.method, a.path) for a in server.asked] == [("GET", "/get_model_info")]


def test_gen_sends_exactly_the_contracts_request():
    state, server = run(Model(["yes"]), program, "Q?", temperature=0)

    assert state["x"] == "yes"
    assert state.get_meta_info("x")["id"] == "r"
    assert server.bodies("/generate") == [
        {
            "text": "Q?",
            "sampling_params": {
                "skip_special_tokens": True,
                "spaces_between_special_tokens": True,
                "max_new_tokens": 9,
                "min_new_tokens": 0,
                "n": 1,
                "stop": "\n",
                "stop_token_ids": [],
                "stop_regex": [],
                "temperature": 0,
                "top_p": 1.0,
                "top_k": -1,
                "min_p": 0.0,
                "frequency_penalty": 0.0,
                "presence_penalty": 0.0,
                "ignore_eos": False,
                "regex": None,
                "json_schema": None,
            },
            "return_logprob": True,
        }
    ]


def test_template_stops_are_sent():
    _, server = run(Model(), program, "Q?", template="chatml")
    assert server.bodies("/generate")[0]["sampling_params"]["stop"] == ["\n", "<|im_end|>"]


def test_streams_cumulative_text_as_deltas():
    state, server = run(Model(["abc"]), program, "Q?", stream=True)
    assert state["x"] == "abc"
    assert "".join(state.text_iter("x")) == "abc"
    assert server.bodies("/generate")[0]["stream"] is True


def test_several_samples_come_as_a_list_with_and_without_streaming():
    @sgl.function
    def many(s):
        s += sgl.gen("x", n=2)

    for stream in (False, True):
        state, _ = run(Model(["ab", "cd"]), many, stream=stream)
        assert state["x"] == ["ab", "cd"]
        assert len(state.get_meta_info("x")) == 2
        assert state.text() == "ab"


def test_errors_in_a_stream_fail_the_program():
    def answer(asked):
        if asked.path == "/get_model_info":
            return {"model_path": "m"}
        return Events([(None, {"error": {"message": "evicted"}})])

    with serving(answer) as server:
        backend = sgl.RuntimeEndpoint(server.url)
        state = program.run("Q?", backend=backend, stream=True)
        with pytest.raises(sgl.ProgramError, match="evicted"):
            list(state.text_iter())
        backend.shutdown()


def test_refusals_reach_the_reader_with_the_servers_words():
    def answer(asked):
        if asked.path == "/get_model_info":
            return {"model_path": "m"}
        return Status(400, {"error": {"message": "prompt too long"}})

    state, _ = run(answer, program, "Q?")
    with pytest.raises(sgl.ProgramError, match="prompt too long"):
        state["x"]


def test_commit_and_prefix_requests_only_fill_the_cache():
    @sgl.function
    def forking(s):
        s += "p"
        s.fork(2).join()

    _, server = run(Model(), forking)
    assert server.bodies("/generate") == [{"text": "p", "sampling_params": {"max_new_tokens": 0}}]

    with serving(Model()) as server:
        backend = sgl.RuntimeEndpoint(server.url)
        backend.cache_prefix("long")
        backend.shutdown()
    assert server.bodies("/generate") == [
        {"text": "long", "sampling_params": {"max_new_tokens": 0}}
    ]


def choose(model, prompt, choices, method=sgl.token_length_normalized):
    @sgl.function
    def choosing(s):
        s += prompt + sgl.select("x", choices, choices_method=method)

    return run(model, choosing)


def test_select_scores_the_tokens_of_each_choice_alone():
    model = Model(logprobs={"red": -0.5, "blue": -2.0, "green": -0.25, "it": -9.0})
    state, server = choose(model, "What is it? it ", ["red", "blue green"])

    assert state["x"] == "red"
    meta = state.get_meta_info("x")
    assert [[t[2] for t in row] for row in meta["input_token_logprobs"]] == [
        ["red"], ["blue", " ", "green"],
    ]  # fmt: skip
    assert meta["normalized_prompt_logprobs"] == pytest.approx([-0.5, (-2.0 - 1.0 - 0.25) / 3])
    first, second = server.bodies("/generate")
    assert first == {"text": "What is it? it ", "sampling_params": {"max_new_tokens": 0}}
    assert second == {
        "text": ["What is it? it red", "What is it? it blue green"],
        "sampling_params": {"max_new_tokens": 0, "temperature": 0},
        "return_logprob": True,
        "return_text_in_logprobs": True,
        "logprob_start_len": 6,
    }


def test_select_keeps_a_token_that_merged_prompt_and_choice():
    model = Model(logprobs={"ab": -0.5, "c": -1.0}, healed=[(" ", "b")])
    model.tokens = lambda text: ["a", "ab"[1:]] if text == "ab" else WORD.findall(text)
    healing = Model(logprobs={"x": -3.0, " y": -0.5, "z": -1.0}, healed=[(" ", "y")])

    state, _ = choose(healing, "p x ", ["y", "z"])

    rows = state.get_meta_info("x")["input_token_logprobs"]
    assert [[t[2] for t in row] for row in rows] == [[" y"], ["z"]]
    assert state["x"] == "y"


def test_select_after_an_empty_or_short_prompt():
    state, _ = choose(Model(logprobs={"b": -0.5}), "", ["a c", "b"])
    assert state["x"] in ("a c", "b")
    state, _ = choose(Model(logprobs={"a": -2.0, "b": -0.5}), "p ", ["a", "b"])
    assert state["x"] == "b"


def test_select_can_compare_with_the_choices_alone():
    model = Model(logprobs={"a": -1.0, "b": -1.5, "c": -0.5})
    state, server = choose(model, "p p ", ["a b", "c b"], sgl.unconditional_likelihood_normalized)

    ids = server.bodies("/generate")[2]["input_ids"]
    assert server.bodies("/generate")[2] == {
        "input_ids": ids, "sampling_params": {"max_new_tokens": 0}, "return_logprob": True,
        "logprob_start_len": 0,
    }  # fmt: skip
    assert [len(row) for row in ids] == [3, 3]
    scores = state.get_meta_info("x")["normalized_unconditional_prompt_logprobs"]
    assert scores == pytest.approx([-1.0 / 3, -0.5 / 3])
    assert state["x"] == "c b"


def test_select_needs_temperature_zero():
    @sgl.function
    def hot(s):
        s += sgl.select("x", ["a"], temperature=0.5)

    state, _ = run(Model(), hot)
    with pytest.raises(sgl.ProgramError, match="temperature"):
        state["x"]


def test_pictures_go_with_every_request(tmp_path):
    @sgl.function
    def looking(s, count):
        for _ in range(count):
            s += sgl.image(b"png")
        s += sgl.gen("x")

    assert run(Model(), looking, 1)[1].bodies("/generate")[0]["image_data"] == "cG5n"
    assert run(Model(), looking, 2)[1].bodies("/generate")[0]["image_data"] == ["cG5n", "cG5n"]


def test_control_routes():
    with serving(Model()) as server:
        backend = sgl.RuntimeEndpoint(server.url, api_key="secret")
        backend.flush_cache()
        backend.start_profile()
        backend.stop_profile()
        assert backend.get_server_info() == {"path": "/server_info", "method": "GET"}
        backend.concatenate_and_append(["a"], "b")
        backend.shutdown()
    assert [(a.method, a.path) for a in server.asked[1:]] == [
        ("POST", "/flush_cache"), ("GET", "/start_profile"), ("GET", "/stop_profile"),
        ("GET", "/server_info"), ("POST", "/concate_and_append_request"),
    ]  # fmt: skip
    assert {a.headers["Authorization"] for a in server.asked} == {"Bearer secret"}


class FakeEngine:
    """The generate of an engine, on the same model."""

    def __init__(self, model):
        self.model = model

    def get_model_info(self):
        return {"model_path": "qwen2-7b-instruct"}

    def generate(self, prompt=None, stream=False, **body):
        if prompt is not None:
            body["text"] = prompt
        if stream:
            return (event for _, event in self.model.stream(body).events)
        return self.model.generate(body)

    def flush_cache(self):
        return True

    def get_server_info(self):
        return {"here": True}

    def shutdown(self):
        self.model = None


def test_engines_are_backends():
    engine = FakeEngine(Model(["yes", "no", "abc"], logprobs={"b": -0.1}))

    assert program.run("Q?", backend=engine)["x"] == "yes"
    backend = EngineBackend(engine)
    assert backend.get_chat_template().name == "qwen"
    assert program.run("Q?", backend=backend)["x"] == "no"
    stream = program.run("Q?", backend=backend, stream=True)
    assert list(stream.text_iter("x")) == ["abc"] or stream["x"] == "abc"

    @sgl.function
    def choosing(s):
        s += "p p " + sgl.select("x", ["a", "b"], choices_method=sgl.greedy_token_selection)

    assert choosing.run(backend=backend)["x"] == "b"
    assert backend.flush_cache() is True
    assert backend.get_server_info() == {"here": True}
    assert EngineBackend(engine, "chatml").get_chat_template().name == "chatml"
    backend.shutdown()
    assert engine.model is None
