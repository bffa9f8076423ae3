"""The commands as a user runs them: real processes, real sockets."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from itertools import pairwise

import httpx
import psutil
import pytest

from sylvan.cli import main
from sylvan.cli.client import ApiClient, ServerError
from tests.support.audits import assert_server_lost_nothing
from tests.support.tiny import ENDLESS, write_model

START_S = 120
FLAGS = (
    "--load-format",
    "dummy",
    "--device",
    "cpu",
    "--threads",
    "1",
    "--max-total-tokens",
    "32Ki",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "tiny")


def command(*words):
    return [sys.executable, "-m", "sylvan", *map(str, words)]


def run(*words, **options):
    return subprocess.run(command(*words), check=False, capture_output=True, text=True, **options)


@contextlib.contextmanager
def served(model, *flags, **options):
    """A running server, and the URL that it printed."""
    words = command("serve", model, *FLAGS, "--port", 0, *flags)
    process = subprocess.Popen(
        words, stdout=subprocess.PIPE, text=True, start_new_session=True, **options
    )
    try:
        url = ""
        for line in process.stdout:
            match = re.search(r"serves tiny at (\S+) ", line)
            if match:
                url = match[1]
            if "documentation:" in line:
                break
        assert url, "the server ended before it was ready"
        yield process, url
        if process.poll() is None and url.startswith("http"):
            assert_server_lost_nothing(url, dict(pairwise(flags)).get("--api-key", ""))
    finally:
        if process.poll() is None:
            process.kill()
        process.wait(START_S)
        process.stdout.close()


@pytest.fixture(scope="module")
def guarded(model, tmp_path_factory):
    """The URL of a server whose key is sesame, and which has a chat template of its own."""
    file = tmp_path_factory.mktemp("templates") / "fixed.jinja"
    file.write_text("FIXED {{ messages[-1].content }} END")
    flags = ("--processes", "one", "--api-key", "sesame", "--chat-template", file)
    with served(model, *flags) as (_, url):
        yield url


def replayed(capsys, *words):
    """Exit status and output of `sylvan replay`, in this process."""
    code = main(["replay", *map(str, words)])
    return code, *capsys.readouterr()


def children(pid):
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]


def gone(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "Z"


@pytest.mark.slow
def test_server_answers_drains_leaves_nothing_and_its_record_is_replayed_without_a_model(
    model, tmp_path
):
    folder = tmp_path / "flight"
    options = {"temperature": 0, "ignore_eos": True}
    with served(model, "--record", folder) as (process, url):
        port = url.rpartition(":")[2]
        with ApiClient(url) as client:
            assert client.is_ready()
            assert client.model() == "tiny"
            assert "".join(client.complete("abd", max_tokens=5, **options))
            stream = client.complete("abc", max_tokens=200, **options)
            first = next(stream)
            pids = children(process.pid)

            process.send_signal(signal.SIGTERM)
            text = first + "".join(stream)

        assert text
        assert process.wait(START_S) == 0
        assert pids
        assert all(gone(pid) for pid in pids)

    assert f"{port} is free" in run("check", "--port", port).stdout
    done = run("replay", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 requests, 205 tokens" in done.stdout


def test_second_interrupt_ends_at_once(model):
    with served(model, "--server.drain-s", "600") as (process, url), ApiClient(url) as client:
        stream = client.complete("abc", max_tokens=ENDLESS, temperature=0, ignore_eos=True)
        next(stream)
        pids = children(process.pid)
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)

        code = process.wait(START_S)
        with contextlib.suppress(ServerError):
            stream.close()

    assert code in (0, 130)  # 0 if all had ended between the two
    assert pids


@pytest.mark.slow
def test_given_chat_template_renders_the_prompts_of_all_apis(guarded):
    prompt = "FIXED Hi END"  # every byte is a token of this model
    turn = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "stream": False}
    with httpx.Client(base_url=guarded, headers={"authorization": "Bearer sesame"}) as http:

        def post(path, body):
            response = http.post(path, json=body)
            assert response.status_code == 200, response.text
            return response.json()

        rendered = post("/v1/chat/render", turn)
        assert rendered["text"] == prompt
        assert post("/tokenize", turn)["tokens"] == rendered["input_ids"]
        chat = post("/v1/chat/completions", turn | {"max_tokens": 1})
        message = post("/v1/messages/count_tokens", turn)
        answer = post("/v1/responses", {"input": "Hi", "max_output_tokens": 1})
        ollama = post("/api/chat", turn | {"options": {"num_predict": 1}})
    count = len(rendered["input_ids"])
    assert count == len(prompt)
    assert chat["usage"]["prompt_tokens"] == count
    assert message["input_tokens"] == count
    assert answer["usage"]["input_tokens"] == count
    assert ollama["prompt_eval_count"] == count


def test_missing_chat_template_is_refused_before_loading(model):
    done = run("serve", model, *FLAGS, "--port", 0, "--chat-template", "nowhere.jinja")

    assert done.returncode == 2
    assert "Chat template 'nowhere.jinja' is neither a file" in done.stderr


def test_taken_port_is_refused_before_loading(model):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        done = run("serve", model, *FLAGS, "--port", port)

    assert done.returncode == 2
    assert f"port {port} of 127.0.0.1 is taken; port" in done.stderr


@pytest.mark.slow
def test_generate_starts_a_server_of_its_own_which_says_what_others_say(model, guarded):
    done = run("generate", "hello", "--model", model, *FLAGS, "--max-tokens", 8)
    with ApiClient(guarded, api_key="sesame") as client:
        text = "".join(client.complete("hello", max_tokens=8, temperature=0))

    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{text}\n"
    assert text


@pytest.mark.slow
def test_generate_says_why_it_cannot_start(model):
    done = run("generate", "hello", "--model", model, "--device", "cpu")  # it has no weights

    assert done.returncode == 1
    assert "safetensors" in done.stderr


def test_chat_talks_to_a_server(guarded, tmp_path):
    lines = f"hi\n/save {tmp_path / 'chat.json'}\n/quit\n"
    done = run("chat", "--url", guarded, "--key", "sesame", input=lines)
    refused = run("generate", "x", "--url", guarded)

    assert done.returncode == 0, done.stderr
    assert "saved 2 messages" in done.stdout
    assert refused.returncode == 1
    assert "401" in refused.stderr


@pytest.mark.slow
def test_server_on_a_unix_socket_stops_with_its_standard_input(model, tmp_path):
    words = command(
        "serve", model, *FLAGS, "--uds", tmp_path / "s", "--until-eof", "--processes", "one"
    )
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        out = b""
        while b"curl" not in out:
            line = process.stdout.readline()
            assert line, "the server ended before it was ready"
            out += line
        process.stdin.close()

        assert process.wait(START_S) == 0
    assert b"--unix-socket" in out


@pytest.mark.slow
def test_server_continues_recording_after_its_scheduler_died(model, tmp_path, capsys):
    folder = tmp_path / "flight"
    options = {"temperature": 0, "ignore_eos": True}
    with served(model, "--record", folder) as (process, url):
        with ApiClient(url) as client:
            whole = "".join(client.complete("abc", max_tokens=400, **options))
            stream = client.complete("abc", max_tokens=400, **options)
            said = next(stream)
            os.kill(scheduler_of(process), signal.SIGKILL)
            assert said + "".join(stream) == whole
            assert "".join(client.complete("abd", max_tokens=5, **options))
        process.send_signal(signal.SIGTERM)
        process.wait(START_S)

    assert sorted(os.listdir(folder)) == ["run-1", "run-2"]
    code, out, error = replayed(capsys, folder)
    assert code == 0, out + error
    first, second = out.splitlines()
    assert re.match(r"run-1 \(started .*\): the same decisions: .* 2 requests", first)
    assert re.match(r"run-2 \(started .*\): the same decisions: ", second)
    for life, line in (("1", first), ("2", second)):
        assert replayed(capsys, folder, "--run", life)[1].splitlines() == [line]
    until = replayed(capsys, folder, "--until", 2)[1]
    assert until.count("the same decisions: 2 steps") == 2
    code, _, error = replayed(capsys, folder, "--run", 3)
    assert code != 0
    assert "holds run-1, run-2" in error


def scheduler_of(process):
    """The pid of a server's scheduler."""
    for child in psutil.Process(process.pid).children(recursive=True):
        if any("scheduler_process" in word for word in child.cmdline()):
            return child.pid
    raise AssertionError("the server has no scheduler process")
