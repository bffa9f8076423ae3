"""A server that sees, on a real GPU: its answers are those of the CPU. Run with `--device cuda`."""

from __future__ import annotations

import httpx
import pytest

from tests.e2e.conftest import running
from tests.e2e.test_encoder_apart import encoder
from tests.e2e.test_multimodal import chat, part, png, said, tokens
from tests.support.chosen import device_name
from tests.support.multimodal import write_served

pytestmark = pytest.mark.gpu

TIMEOUT_S = 180


def answers(http) -> list[list[int]]:
    questions = [
        [said("what?")],
        [part(png(1)), said("and?")],
        [part(png(2, 80, 30)), said("or "), part(png(3)), said("?")],
    ]
    cold = [tokens(chat(http, question)) for question in questions]
    assert [tokens(chat(http, question)) for question in questions] == cold
    return cold


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen3-vl"])
def test_answers_are_those_of_the_cpu(name, tmp_path):
    folder, found = str(write_served(name, tmp_path)), []
    for device in ("cpu", device_name()):
        flags = ("--dtype", "float32", "--device", device, "--cache.max-tokens", "16384")
        with running(folder, *flags) as server:
            with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as http:
                found.append(answers(http))
    assert found[0] == found[1]


def test_an_encoder_only_server_runs_on_the_gpu(tmp_path):
    folder, device = str(write_served("qwen2-vl", tmp_path)), device_name()
    question = [part(png(1)), said("and?")]
    flags = ("--dtype", "float32", "--device", device)
    with running(folder, *flags, "--cache.max-tokens", "16384") as server:
        with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as http:
            expected = tokens(chat(http, question))
    with encoder(folder, "--device", device) as url:
        texts = ("--language-only", "--encoder-urls", url, "--cache.max-tokens", "16384")
        with running(folder, *flags, *texts) as server:
            with httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as http:
                assert tokens(chat(http, question)) == expected
