"""PyTorch's own weight files: only when asked for, and tensors only."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sylvan.cli.main import main
from sylvan.config.checkpoint import model_facts
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.models.files import open_weights
from tests.parity.checkpoints import make
from tests.parity.serving import Serving


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> tuple[Path, Path]:
    """The same model as safetensors and as one .bin file."""
    folder = tmp_path_factory.mktemp("models")
    make("llama", folder / "safe")
    state = load_file(folder / "safe" / "model.safetensors")
    torch.save(state, _others(folder / "safe", folder / "bin") / "pytorch_model.bin")
    return folder / "safe", folder / "bin"


def _others(source: Path, target: Path) -> Path:
    target.mkdir()
    for file in source.iterdir():
        if file.suffix != ".safetensors":
            (target / file.name).write_bytes(file.read_bytes())
    return target


def _tokens(path: Path, load_format: str) -> list[list[int]]:
    serving = Serving(path, options={"load_format": load_format})
    return serving.generate([[5, 6, 7], [8, 9]], max_new_tokens=8)


def test_bin_gives_the_tokens_of_safetensors(models):
    safe, pickled = models

    assert _tokens(pickled, "pt") == _tokens(safe, "auto")


def test_old_files_and_shards_are_read(models, tmp_path):
    state = load_file(models[0] / "model.safetensors")
    names = sorted(state)
    path = _others(models[0], tmp_path / "m")
    first = {name: state[name] for name in names[:5]}
    torch.save(first, path / "a.bin", _use_new_zipfile_serialization=False)
    torch.save({name: state[name] for name in names[5:]}, path / "b.bin")
    places = {name: "a.bin" if name in first else "b.bin" for name in names}
    index = path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": places}))

    assert _tokens(path, "pt") == _tokens(models[0], "auto")
    index.write_text(json.dumps({"weight_map": places | {"more": "a.bin"}}))
    with pytest.raises(ConfigError, match=r"'more' is missing from a\.bin"):
        open_weights(path, "pt")


def test_sizes_are_known_before_loading(models):
    facts = model_facts(str(models[1]))

    assert facts.weights == "pt"
    assert facts.num_params == pytest.approx(model_facts(str(models[0])).num_params, rel=0.1)


def test_bin_is_refused_unless_asked_for(models, capsys):
    with pytest.raises(ConfigError, match="--load-format pt reads them") as error:
        open_weights(models[1])
    assert "\n" not in str(error.value)

    assert main(["config", str(models[1])]) == 2
    assert "pickles; --load-format pt reads them" in capsys.readouterr().err
    assert main(["config", str(models[1]), "--load-format", "pt"]) == 0


class Evil:
    """Runs a command when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


@pytest.mark.parametrize("new", [True, False])
def test_code_in_a_file_is_refused_and_not_run(models, tmp_path, new):
    path = _others(models[0], tmp_path / "m")
    content = {"model.norm.weight": torch.ones(4), "x": Evil(tmp_path / "ran")}
    torch.save(content, path / "pytorch_model.bin", _use_new_zipfile_serialization=new)

    with pytest.raises(ConfigError, match="contains other objects than tensors") as error:
        open_weights(path, "pt")

    assert "\n" not in str(error.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "cannot be read as PyTorch weights|contains other objects than tensors"),
        (
            b"PK\x03\x04 cut off",
            "cannot be read as PyTorch weights|contains other objects than tensors",
        ),
        (["no", "names"], "must be a dict of tensors by name"),
        ({"a": {"b": torch.ones(1)}}, "must be a dict of tensors by name"),
    ],
)
def test_broken_files_are_named(models, tmp_path, content, words):
    file = _others(models[0], tmp_path / "m") / "pytorch_model.bin"
    if isinstance(content, bytes):
        file.write_bytes(content)
    else:
        torch.save(content, file)

    with pytest.raises(ConfigError, match=words) as error:
        open_weights(file.parent, "pt")
    assert "pytorch_model.bin" in str(error.value)
    assert "\n" not in str(error.value)


def test_safetensors_win_over_bin(models, tmp_path):
    path = _others(models[0], tmp_path / "m")
    (path / "pytorch_model.bin").write_bytes(b"not looked at")
    (path / "model.safetensors").write_bytes((models[0] / "model.safetensors").read_bytes())

    assert len(open_weights(path).tensors) == len(open_weights(models[0]).tensors)


@pytest.mark.parametrize("load_format", ["gguf", "pt", "safetensors"])
def test_a_format_that_is_not_there_is_named(tmp_path, load_format):
    (tmp_path / "config.json").write_text("{}")

    with pytest.raises(ConfigError, match="holds no"):
        open_weights(tmp_path, load_format)
