"""An encoder on a server of its own: answers are those of a server with both, and errors too."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import ExitStack, contextmanager

import httpx
import pytest

from tests.e2e.conftest import running
from tests.e2e.test_multimodal import part, png, said
from tests.support.multimodal import write_served
from tests.support.transfer import until

KEY = "encode-this"


@contextmanager
def encoder(folder, *flags):
    """`sylvan serve --encoder-only`; yields its address."""
    code = "import sys; from sylvan.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "serve", str(folder), "--encoder-only", "--until-eof"]
    command += ["--server.port", "0", "--dtype", "float32", *flags]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.search(r"Sylvan serves \S+ at (http://\S+)", line):
                yield found[1]
                break
        else:
            pytest.fail("the encoder did not start")
    finally:
        process.communicate(timeout=60)


def ask(url, *parts):
    body = {"messages": [{"role": "user", "content": [*parts]}], "max_tokens": 8, "temperature": 0}
    with httpx.Client(base_url=url, timeout=180) as http:
        return http.post("/v1/chat/completions", json=body)


def counted(url, name):
    text = httpx.get(f"{url}/metrics").text
    found = re.search(rf"^{name} (\d+)$", text, re.MULTILINE)
    return int(found[1]) if found else None


@pytest.mark.slow
def test_answers_are_those_of_one_server(tmp_path):
    folder = write_served("qwen3-vl", tmp_path)  # with vectors for several layers
    prompts = [(part(png(1)), said("what?")), (part(png(2)), part(png(1, 60, 40)), said("both?"))]
    with running(str(folder), "--dtype", "float32") as whole:
        expected = [ask(whole.url, *given).json()["choices"] for given in prompts]

    missing = "http://127.0.0.1:9"  # the discard port: no server answers
    flags = ["--dtype", "float32", "--language-only", "--media.encoder-key", KEY]
    with ExitStack() as stack:
        with encoder(folder, "--api-key", KEY, "--media.item-bytes", "100KB") as far:
            keyed = {"authorization": f"Bearer {KEY}"}
            for content, headers, status in (
                (b"x", {}, 401),
                (b"x", {"authorization": "Bearer other"}, 401),
                (b"x", keyed, 400),
                (bytes(200_000), keyed, 413),
            ):
                found = httpx.post(f"{far}/encode_item", content=content, headers=headers)
                assert found.status_code == status, found.text

            ways = running(str(folder), *flags, "--encoder-urls", far, missing)
            split = stack.enter_context(ways)
            for _ in range(2):
                answers = [ask(split.url, *given).json()["choices"] for given in prompts]
                assert answers == expected
            until(lambda: counted(far, "sylvan_encoder_items_total") == 3)

            broken = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
            bad = ask(split.url, broken)
            assert bad.status_code == 400
            assert bad.json()["error"]["param"] == "messages[0].content[0].image_url.url"

        lost = ask(split.url, part(png(3)), said("what?"))
        assert lost.status_code == 503
        assert "none of 2 encoder servers answers" in lost.text
        assert ask(split.url, said("text")).status_code == 200
