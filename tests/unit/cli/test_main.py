from __future__ import annotations

import re
import subprocess
import sys

import pytest

from sylvan.cli.main import COMMANDS, main
from sylvan.config.fields import fields


def run(capsys, *words):
    code = main(words)
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.parametrize("words", [(), ("--help",), ("-h",), ("help",)])
def test_bare_command_shows_commands_and_three_examples(capsys, words):
    code, out, _ = run(capsys, *words)

    assert code == 0
    assert all(f"  {name} " in out for name in COMMANDS)
    assert len([line for line in out.splitlines() if line.startswith("  sylvan ")]) == 3


def test_version_is_printed(capsys):
    code, out, _ = run(capsys, "--version")

    assert code == 0
    assert re.fullmatch(r"sylvan 0\.\d+\.\d+( \(commit [0-9a-f]{7,40}(-dirty)?\))?", out.strip())


def test_unknown_command_suggests_the_nearest(capsys):
    code, _, err = run(capsys, "srve")

    assert code == 2
    assert "there is no command 'srve' (did you mean serve?)" in err


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(capsys, name):
    code, out, _ = run(capsys, name, "--help")

    assert code == 0
    assert out.startswith(f"usage: sylvan {name}")


def test_help_of_serve_lists_every_flag_whose_feature_exists(capsys):
    _, out, _ = run(capsys, "serve", "--help")

    shown = {word for word in out.split() if word.startswith("--")}
    for path, field in fields().items():
        assert field.flag in shown, path


def test_help_fits_the_terminal(capsys):
    _, out, _ = run(capsys, "serve", "--help")

    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("serve", "--prot", "1"), "--prot: unknown flag (did you mean --port?)"),
        (("serve", "--cache.page-size", "0"), "expected int >= 1 | auto, got '0'"),
        (
            ("serve", "--attn-cp-size", "4"),
            "--attn-cp-size: not supported yet: context and attention parallelism",
        ),
        (
            ("serve", "--disaggregation-mode", "prefill", "--dp", "2"),
            "disagg and server.replicas=2 exclude each other",
        ),
        (("serve", "a", "b"), "unexpected argument 'b'"),
        (("serve", "/no/such/model"), "there is no directory '/no/such/model'"),
        (("config", "--config", "/no/such.yaml"), "cannot read the configuration file"),
        (("config", "--preset", "fast"), "unknown preset 'fast'"),
        (("generate",), "PROMPT is missing"),
        (("generate", "x", "--max-tokens", "many"), "--max-tokens: expected a number"),
        (("chat", "--url", "http://x", "--page-size", "3"), "leave out --page-size"),
        (
            ("chat", "--port", "3"),
            "--port: not for a server that this command starts",
        ),
        (("check", "modle"), "unexpected argument 'modle'"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_why(capsys, tiny_model, words, message):
    if "--disaggregation-mode" in words:
        words = (words[0], str(tiny_model), *words[1:])

    code, out, err = run(capsys, *words)

    assert code == 2
    assert err.startswith("sylvan: error: ")
    assert message in err
    assert out == ""


def test_help_needs_neither_torch_nor_numpy():
    code = (
        "import sys; from sylvan.cli import main; main(['serve', '--help']); "
        "heavy = {'torch', 'numpy', 'fastapi', 'httpx', 'rich'} & set(sys.modules); "
        "sys.exit(bool(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)

    assert done.returncode == 0, done.stderr


def test_config_of_a_model_needs_no_torch(tiny_model):
    code = (
        "import sys; from sylvan.cli import main; main(['config', sys.argv[1]]); "
        "sys.exit('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(tiny_model), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, check=False)

    assert done.returncode == 0, done.stderr
