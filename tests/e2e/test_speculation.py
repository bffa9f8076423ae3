"""Speculation on a real server: the same answers as without, and its counts wherever they show."""

from __future__ import annotations

import concurrent.futures
import subprocess
import sys

import httpx
import pytest

from sylvan.config.checkpoint import model_dir
from tests.e2e.conftest import running
from tests.support.draft_heads import write_head
from tests.support.random_model import write_random_model
from tests.support.transfer import until

pytestmark = pytest.mark.slow

COPY = "Say this again: the red fox ran over the hill, and the red fox ran over the hill, and"
SAPLING = model_dir("sapling")
PROMPTS = [COPY, "Write a poem about rain.", "1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2,", "Hello!"]
WAYS = [
    {"temperature": 0},
    {"temperature": 0.8, "sampling_seed": 4, "top_p": 0.9},
    {"temperature": 1.0, "sampling_seed": 9, "n": 2, "min_new_tokens": 30},
    {"temperature": 0, "stop": [" the"], "min_new_tokens": 3},
    {"temperature": 0, "logit_bias": {"70": 5}},
    {"temperature": 0, "stop_token_ids": [20, 21, 22], "ignore_eos": False},
    {"temperature": 0.7, "sampling_seed": 2, "frequency_penalty": 0.6, "presence_penalty": 0.2},
    {"temperature": 0.7, "sampling_seed": 2, "repetition_penalty": 1.2},
    {"temperature": 0, "regex": r"([a-z]+ ){5,30}\."},
    {
        "temperature": 0.9,
        "sampling_seed": 3,
        "json_schema": '{"type":"array","items":{"enum":[1]}}',
    },
]


@pytest.fixture(scope="module")
def plain(sapling):
    headers = {"authorization": "Bearer secret"}
    with httpx.Client(base_url=sapling.url, headers=headers, timeout=120) as client:
        yield client


@pytest.fixture(scope="module")
def wanted(plain):
    """The answers of a server that does not speculate."""
    return answers(plain, all_at_once=False)


ALL = ("--speculative.adaptive", "false")
FLAGS = {
    "ngram": (*ALL, "--speculative-algorithm", "NGRAM", "--speculative-num-steps", "6"),
    "itself": (
        *ALL,
        "--speculative-algorithm",
        "STANDALONE",
        "--speculative-draft-model-path",
        "sapling",
    ),
}


@pytest.fixture(scope="module", params=FLAGS)
def speculating(request):
    with (
        running("sapling", *FLAGS[request.param]) as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
    ):
        yield client


def bodies():
    return [
        {
            "text": prompt,
            "sampling_params": {"max_new_tokens": 60, "ignore_eos": True, **way},
            "return_logprob": number % 2 == 0,
        }
        for number, (prompt, way) in enumerate((p, w) for p in PROMPTS for w in WAYS)
    ]


def answers(client, all_at_once):
    def ask(body):
        response = client.post("/generate", json=body)
        assert response.status_code == 200, response.text
        return response.json()

    if all_at_once:
        with concurrent.futures.ThreadPoolExecutor(8) as pool:
            return list(pool.map(ask, bodies()))
    return [ask(body) for body in bodies()]


def told(reply):
    """The fields that do not depend on speed."""
    if isinstance(reply, list):
        return [told(part) for part in reply]
    meta = reply["meta_info"]
    names = ("finish_reason", "completion_tokens", "output_token_logprobs")
    return reply["text"], reply["output_ids"], [meta.get(name) for name in names]


@pytest.mark.parametrize("all_at_once", [False, True], ids=["alone", "together"])
def test_answers_are_those_of_a_server_without(wanted, speculating, all_at_once):
    found = answers(speculating, all_at_once)

    for body, want, got in zip(bodies(), wanted, found, strict=True):
        assert told(got) == told(want), body


def test_texts_to_draft_from_come_and_go(speculating):
    odd = {"max_new_tokens": 40, "temperature": 1.5, "sampling_seed": 3, "ignore_eos": True}
    body = {"text": "Hi there", "sampling_params": odd}  # what the model does not mostly say
    first = speculating.post("/generate", json=body).json()
    corpus = {"corpus_id": "said", "token_chunks": [first["output_ids"]]}
    added = speculating.post("/add_external_corpus", json=corpus)
    state = speculating.get("/server_info").json()["internal_states"][0]
    if state["config"]["speculative"]["algorithm"] != "ngram":
        assert added.status_code == 400
        assert "ngram" in added.text
        return
    assert added.json()["loaded_token_count"] == len(first["output_ids"])
    listed = speculating.get("/list_external_corpora").json()
    assert listed["corpus_token_counts"] == {"said": len(first["output_ids"])}
    second = speculating.post("/generate", json=body).json()

    assert second["output_ids"] == first["output_ids"]
    accepted = [r["meta_info"].get("spec_num_correct_drafts", 0) for r in (first, second)]
    assert accepted[1] > max(accepted[0], 20)
    for wrong, words in (
        ({"documents": ["a"], "token_chunks": [[1]]}, "either documents or token_chunks"),
        ({"token_chunks": [[-1]]}, "ids must be in 0.."),
        ({"file_path": "/etc/passwd"}, "no files are read for clients"),
        ({"documents": ["red fox " * 100_000]}, "speculative.corpus_tokens"),
    ):
        refused = speculating.post("/add_external_corpus", json=wrong)
        assert refused.status_code == 400
        assert words in refused.text
    added = speculating.post("/add_external_corpus", json={"documents": ["The red fox."]}).json()
    for name in ("said", added["corpus_id"]):
        removed = speculating.post("/remove_external_corpus", json={"corpus_id": name})
        assert removed.json()["success"]
    assert speculating.get("/list_external_corpora").json()["corpus_ids"] == []
    gone = speculating.post("/remove_external_corpus", json={"corpus_id": "said"})
    assert gone.status_code == 404


def test_a_head_that_knows_nothing_changes_no_answer(wanted, tmp_path_factory):
    head = write_head(tmp_path_factory.mktemp("head"), "eagle3", drafted=500, model=SAPLING)
    flags = ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(head))
    with (
        running("sapling", *flags, "--speculative.adaptive", "false") as server,
        httpx.Client(base_url=server.url, timeout=120) as client,
    ):
        found = answers(client, all_at_once=True)
        state = client.get("/server_info").json()["internal_states"][0]

    for body, want, got in zip(bodies(), wanted, found, strict=True):
        assert told(got) == told(want), body
    assert state["speculation"]["drafts"] > 500
    assert state["speculation"]["failures"] == 0
    meta = found[0]["meta_info"]
    assert meta["spec_num_proposed_drafts"] > 100
    assert meta["spec_accept_length"] >= 1


def test_counts_are_in_replies_loads_and_metrics(speculating):
    ask = {"max_new_tokens": 80, "temperature": 0, "ignore_eos": True}
    reply = speculating.post("/generate", json={"text": COPY * 3, "sampling_params": ask}).json()
    meta = reply["meta_info"]

    assert meta["spec_verify_ct"] == sum(meta["spec_correct_drafts_histogram"]) > 0
    assert 0 < meta["spec_num_correct_drafts"] <= meta["spec_num_proposed_drafts"]
    assert meta["spec_accept_length"] > 2
    share = meta["spec_num_correct_drafts"] / meta["spec_num_proposed_drafts"]
    assert meta["spec_accept_rate"] == pytest.approx(share)

    def load():  # the scheduler reports its load apart from its outputs, and may do so later
        [found] = speculating.get("/v1/loads").json()["loads"]
        return found["speculative"]

    until(lambda: load()["accept_length"] > 1)
    assert 0 < load()["accept_rate"] <= 1
    assert "sglang:spec_accept_length" in speculating.get("/metrics").text
    state = speculating.get("/server_info").json()["internal_states"][0]
    assert state["avg_spec_accept_length"] > 1
    assert state["speculation"]["drafts"] > 0


def test_a_reply_without_drafts_says_nothing_of_them(plain):
    ask = {"max_new_tokens": 4, "temperature": 0}
    reply = plain.post("/generate", json={"text": "Hi", "sampling_params": ask}).json()

    assert not [name for name in reply["meta_info"] if name.startswith("spec_")]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("STANDALONE",), "standalone needs a smaller model"),
        (("NEXTN",), "multi-token prediction layers of LlamaForCausalLM are not supported"),
        (("DFLASH",), "speculative.algorithm=dflash: not supported yet"),
        (("EAGLE3",), "speculative.algorithm=eagle3 needs a draft head"),
        (("EAGLE3", "--speculative-draft-model-path", "STRANGER"), "was made for 264 tokens"),
        (("EAGLE", "--speculative-draft-model-path", "sapling"), "no tensor 'fc.weight', so it is"),
        (("STANDALONE", "--speculative-draft-model-path", "/nowhere"), "there is no directory"),
        (("STANDALONE", "--speculative-draft-model-path", "STRANGER"), "its tokenizer differs"),
    ],
)
def test_what_cannot_be_drafted_with_is_refused_at_the_start(tmp_path, flags, words):
    stranger = write_random_model(tmp_path / "stranger")
    flags = [str(stranger) if flag == "STRANGER" else flag for flag in flags]
    code = "import sys; from sylvan.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "serve", "sapling", "--server.port", "0"]
    ended = subprocess.run(
        [*command, "--speculative-algorithm", *flags],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert ended.returncode != 0
    assert words in ended.stderr
