from __future__ import annotations

import json

import pytest

from sylvan.cli.check import check_machine
from sylvan.cli.main import main
from sylvan.config.tree import ServerConfig
from sylvan.utils.machine import Machine


def machine(**changes):
    values = {
        "cpu_name": "Fast CPU 9",
        "features": frozenset({"avx2"}),
        "cores": 2,
        "total_bytes": 8 << 30,
        "available_bytes": 4 << 30,
    }
    return Machine(**(values | changes))


def findings(**changes):
    found = check_machine(machine(**changes), ServerConfig(port=0))
    return {finding.what: finding for finding in found}


def test_machine_is_described():
    found = findings()

    assert found["torch"].status == "ok"
    assert found["CPU"].detail == "Fast CPU 9, 2 cores usable"
    assert found["memory"].detail == "4 GiB free of 8 GiB"


@pytest.mark.parametrize("name", ["avx512f", "avx512_bf16", "avx512_vnni"])
def test_each_lack_says_what_it_costs(name, monkeypatch):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    found = findings()

    assert found["avx2"].status == "ok"
    assert found[name].status == "slow"
    assert found[name].cost


def test_little_memory_is_reported():
    assert findings(available_bytes=1 << 20)["memory"].status == "slow"


def test_check_prints_a_line_per_finding(capsys):
    assert main(["check", "--port", "0"]) == 0
    out = capsys.readouterr().out
    assert "torch" in out
    assert "C++ compiler" in out


def test_model_without_weights_is_reported(capsys, tiny_model):
    code = main(["check", "model", str(tiny_model), "--json", "--device", "cpu"])

    found = {row["what"]: row for row in json.loads(capsys.readouterr().out)}
    assert code == 1
    assert found["weights"]["status"] == "missing"
    assert found["tokenizer.json"]["status"] == "ok"
    assert found["architecture"]["detail"] == "LlamaForCausalLM, path native"
    assert "KV cache" in found["fits"]["detail"]


def test_model_that_does_not_fit_is_reported(capsys, tiny_model):
    main(["check", "model", str(tiny_model), "--json", "--device", "cpu", "--kv-memory", "99TiB"])

    found = {row["what"]: row for row in json.loads(capsys.readouterr().out)}
    assert found["fits"]["status"] == "missing"
    assert "too little memory" in found["fits"]["cost"]


def test_kernels_are_listed_with_the_reason(capsys):
    assert main(["check", "kernels"]) == 0
    out = capsys.readouterr().out
    assert "portable" in out
    assert out.count("in use") <= 1
