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


def asked(folder, *flags) -> list[list[int]]:
    whole = (folder, "--dtype", "float32", "--cache.max-tokens", "16384", *flags)
    with running(*whole) as server, httpx.Client(base_url=server.url, timeout=TIMEOUT_S) as http:
        return answers(http)


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen3-vl"])
def test_answers_are_those_of_the_cpu(name, tmp_path):
    folder = str(write_served(name, tmp_path))
    assert asked(folder, "--device", "cpu") == asked(folder, "--device", device_name())


def test_an_encoder_only_server_runs_on_the_gpu(tmp_path):
    folder, device = str(write_served("qwen2-vl", tmp_path)), ("--device", device_name())
    expected = asked(folder, *device)
    with encoder(folder, *device) as url:
        assert asked(folder, *device, "--language-only", "--encoder-urls", url) == expected
