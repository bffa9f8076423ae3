from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sylvan import kernels
from sylvan.cli.check import check_machine
from sylvan.cli.main import main
from sylvan.config.tree import ServerConfig
from sylvan.kernels import registry as kernel_registry
from sylvan.kernels.inventory import op_uses
from sylvan.kernels.native.library import describe
from sylvan.runtime.models import registry
from sylvan.utils.machine import Machine
from tests.support.quantised_models import write_quantised_model
from tests.support.random_model import VOCAB, write_random_model


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
    assert found["tokenizer"]["status"] == "ok"
    assert found["architecture"]["detail"] == "LlamaForCausalLM, path native"
    assert "KV cache" in found["fits"]["detail"]


def test_model_that_does_not_fit_is_reported(capsys, tiny_model):
    main(["check", "model", str(tiny_model), "--json", "--device", "cpu", "--kv-memory", "99TiB"])

    found = {row["what"]: row for row in json.loads(capsys.readouterr().out)}
    assert found["fits"]["status"] == "missing"
    assert "too little memory" in found["fits"]["cost"]


def test_ranks_are_described(capsys):
    assert main(["check", "model", "sapling", "--tp", "2"]) == 0
    shown = capsys.readouterr().out
    assert "2 ranks share each layer; the same bits as on one rank" in shown

    main(["check", "model", "sapling", "--tp", "3"])
    shown = capsys.readouterr().out
    assert "MISSING  ranks" in shown
    assert "num_attention_heads (4) does not divide by 3 ranks; this model divides" in shown


def test_kernels_are_listed_with_the_reason(capsys):
    assert main(["check", "kernels"]) == 0
    out = capsys.readouterr().out
    assert "portable" in out
    assert out.count("in use") <= 1


OPS = [
    *("cast", "embed", "experts", "gating", "latent", "matmul"),
    *("norm", "paged", "ragged", "rows", "sample", "scan"),
]


def ops_found(capsys):
    assert main(["check", "kernels", "--json"]) == 0
    return {row["what"]: row for row in json.loads(capsys.readouterr().out)}


@pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled")
def test_each_op_says_what_computes_it(capsys):
    found = ops_found(capsys)

    assert [name for name in found if name in OPS] == OPS
    assert found["matmul"]["detail"].startswith(f"cpu: native ({describe().variant}, the fastest")
    assert found["ragged"]["detail"].startswith("cpu: PyTorch (there is no native kernel)")
    assert {row["status"] for row in found.values()} == {"ok"}


def test_without_compiled_kernels_it_is_degraded(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(kernels, "describe", lambda: describe(tmp_path))

    found = ops_found(capsys)

    assert found["kernels"]["status"] == "slow"
    assert found["kernels"]["detail"].startswith("degraded")
    assert "install g++ and run: python -m sylvan.kernels.build" in found["kernels"]["cost"]
    assert found["paged"]["detail"].startswith("cpu: PyTorch (its native kernel is not compiled)")
    assert (found["paged"]["status"], found["ragged"]["status"]) == ("slow", "ok")


def test_ops_on_a_gpu_name_triton_or_the_lack_of_it(monkeypatch):
    def details(there):
        monkeypatch.setattr(kernel_registry, "is_installed", lambda name: there)
        return {use.name: use.detail for use in op_uses(describe(), {"cuda": "cuda"})}

    assert details(there=True)["norm"].endswith("; cuda: triton")
    assert details(there=True)["latent"].endswith("; cuda: PyTorch (there is no kernel)")
    assert "pip install 'sylvan[gpu]'" in details(there=False)["norm"]


@pytest.fixture
def whole_model(tmp_path):
    """A model with weights, a template, and a vocabulary that fits."""
    return write_random_model(tmp_path / "whole")


def check_model(capsys, *words):
    code = main(["check", "model", *map(str, words), "--json", "--device", "cpu"])
    return code, {row["what"]: row for row in json.loads(capsys.readouterr().out)}


def test_a_whole_model_is_described(capsys, whole_model):
    code, found = check_model(capsys, whole_model)

    assert code == 0
    assert found["architecture"]["detail"] == "LlamaForCausalLM, path native"
    # 2 layers of 2 heads of 16 columns, keys and values, in 4 bytes
    assert found["memory"]["detail"].endswith("KV cache 512 B a token in float32")
    assert found["tokenizer"]["detail"] == "tokenizer.json"
    assert found["vocabulary"]["detail"].endswith(f"{VOCAB} embedding rows")
    assert found["chat template"]["detail"] == "default"
    assert found["tool calls"]["detail"].endswith(", by the template")
    assert found["reasoning"]["detail"].endswith(", by the template")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda w: w.pop("model.norm.weight"), "lacks the tensor 'model.norm.weight'"),
        (
            lambda w: w.update({"model.norm.weight": np.ones(3, np.float32)}),
            r"'model.norm.weight' has shape [3], but config.json implies [64]",
        ),
        (lambda w: w.update(more=np.ones(3, np.float32)), "has the tensor 'more'"),
    ],
)
def test_tensors_are_compared_without_loading_them(capsys, whole_model, spoil, words):
    file = whole_model / "model.safetensors"
    weights = load_file(file)
    code, found = check_model(capsys, whole_model)
    assert (code, found["tensors"]["detail"]) == (
        0,
        f"{len(weights)} compared by name and shape",
    )
    spoil(weights)
    save_file(weights, file)

    code, found = check_model(capsys, whole_model)

    assert code == 1
    assert words in found["tensors"]["cost"]


def test_scales_of_keys_and_values_are_told(capsys, whole_model):
    file = whole_model / "model.safetensors"
    plain = load_file(file)
    layers = {int(name.split(".")[2]) for name in plain if ".layers." in name}
    names = [f"model.layers.{i}.self_attn.{side}_scale" for i in layers for side in "kv"]

    save_file(plain | dict.fromkeys(names, np.ones(1, np.float32)), file, {"format": "pt"})
    code, found = check_model(capsys, whole_model)
    assert code == 0
    used = f"of {len(layers)} layers; cache.dtype=fp8_e4m3 uses them"
    assert found["KV scales"]["detail"] == used

    save_file(plain | dict.fromkeys(names, np.zeros(1, np.float32)), file, {"format": "pt"})
    code, found = check_model(capsys, whole_model)
    assert code == 0  # it is served with other caches
    assert "not positive" in found["KV scales"]["cost"]


@pytest.mark.parametrize(
    ("case", "stored", "kept"),
    [
        ("gptq-order-asym", "4 bits with zero points, groups of 32, inputs in order", "in 4 bits"),
        ("fp8-block", "FP8 (e4m3) in blocks of 128 x 128", "in 8 bits"),
        ("modelopt-nvfp4", "ModelOpt NVFP4 (e2m1 in groups of 16)", "in 4 bits"),
        ("bnb-nf4", "bitsandbytes, NF4", "in 4 bits"),
    ],
)
def test_the_format_of_quantised_matrices_is_told(capsys, tmp_path, case, stored, kept):
    code, found = check_model(capsys, write_quantised_model(tmp_path / "model", case))

    assert code == 0
    assert stored in found["quantisation"]["detail"]
    assert f"kept {kept}, rows are kept in the model's type" in found["quantisation"]["detail"]
    assert found["tensors"]["detail"].endswith("compared by name and shape")


def test_why_a_format_is_not_served_is_told(capsys, whole_model):
    file = whole_model / "config.json"
    raw = json.loads(file.read_text())
    file.write_text(json.dumps(raw | {"quantization_config": {"quant_method": "exl2"}}))

    code, found = check_model(capsys, whole_model)

    assert code == 1
    assert found["quantisation"]["status"] == "missing"
    assert "EXL2 mixes widths within a matrix" in found["quantisation"]["cost"]


def test_a_chosen_template_is_read(capsys, whole_model, tmp_path):
    file = tmp_path / "plain.jinja"
    file.write_text("{{ messages[0].content }}")

    code, found = check_model(capsys, whole_model, "--chat-template", str(file))

    assert (code, found["chat template"]["detail"]) == (0, str(file))
    assert found["tool calls"]["detail"] == "none: the template contains no markers"
    for text in (None, "{% if %}"):
        file.unlink() if text is None else file.write_text(text)
        code, found = check_model(capsys, whole_model, "--chat-template", str(file))
        assert (code, found["chat template"]["status"]) == (1, "missing")
        assert str(file) in found["chat template"]["cost"]


def test_the_memory_is_that_of_the_flags(capsys, whole_model):
    _, found = check_model(capsys, whole_model, "--dtype", "bfloat16")

    assert found["memory"]["detail"].endswith("KV cache 256 B a token in bfloat16")


def test_the_way_through_transformers_is_explained(capsys, whole_model, monkeypatch):
    pytest.importorskip("transformers")
    monkeypatch.delitem(registry.MODELS, "LlamaForCausalLM")
    config = json.loads((whole_model / "config.json").read_text())
    config |= {"auto_map": {"AutoModelForCausalLM": "mine.Model"}}
    (whole_model / "config.json").write_text(json.dumps(config))

    _, found = check_model(capsys, whole_model)

    assert "path transformers: no native file serves it" in found["architecture"]["detail"]
    assert "not run" in found["code"]["detail"]


def test_what_nothing_serves_is_explained(capsys, whole_model):
    config = json.loads((whole_model / "config.json").read_text())
    config |= {"architectures": ["MineForCausalLM"], "model_type": "mine"}
    config["auto_map"] = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "mine.C")
    (whole_model / "config.json").write_text(json.dumps(config))

    code, found = check_model(capsys, whole_model)

    assert code == 1
    assert "(mine.C), which is run only with --trust" in found["architecture"]["cost"]

    _, found = check_model(capsys, whole_model, "--trust-remote-code")

    assert "there is no mine.py" in found["architecture"]["cost"]
    assert "run only if nothing else can serve it" in found["code"]["detail"]


def test_a_tokenizer_that_does_not_fit_is_reported(capsys, whole_model):
    config = json.loads((whole_model / "config.json").read_text())
    (whole_model / "config.json").write_text(json.dumps(config | {"vocab_size": 100}))

    code, found = check_model(capsys, whole_model)

    assert code == 1
    assert "the model has only 100" in found["vocabulary"]["cost"]


def test_a_missing_tokenizer_is_reported(capsys, whole_model):
    (whole_model / "tokenizer.json").unlink()

    code, found = check_model(capsys, whole_model)

    assert code == 1
    assert "has no tokenizer that can be read" in found["tokenizer"]["cost"]


def test_pickled_weights_are_reported_unless_asked_for(capsys, whole_model):
    (whole_model / "model.safetensors").rename(whole_model / "pytorch_model.bin")

    code, found = check_model(capsys, whole_model)
    allowed, also = check_model(capsys, whole_model, "--load-format", "pt")

    assert (code, allowed) == (1, 0)
    assert "--load-format pt reads them" in found["weights"]["cost"]
    assert also["weights"]["detail"].startswith("1 PyTorch .bin files")


@pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled")
def test_the_program_is_listed_with_the_bytes_of_each_op(capsys, whole_model):
    code, found = check_model(capsys, whole_model, "--program", "--context-len", "64")

    assert code == 0
    assert found["program"]["detail"].startswith("program (")
    names = [row["detail"].split()[0] for what, row in found.items() if what.startswith("op ")]
    assert names[0] == "Embed"
    assert names[-1] == "Linear"
    assert names.count("Attention") == 2  # layers
    head = found[f"op {len(names) - 1}"]["detail"]
    assert "outputs" in head
    # a vocabulary padded to 32 rows, of hidden columns in 4 bytes
    assert f"weights {-(-VOCAB // 32) * 32 * 64 * 4:>13,} B" in head


def test_without_a_program_the_runner_is_named(capsys, whole_model):
    _, found = check_model(capsys, whole_model, "--program", "--runner", "eager")

    assert (found["program"]["status"], found["program"]["detail"]) == ("slow", "eager")
