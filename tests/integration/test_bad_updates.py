"""Updates that are cut off, misshaped, foreign or not finite change nothing."""

from __future__ import annotations

import os
import shutil
import socket
import threading
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save

from sylvan.protocol.commands import (
    BytesTensors,
    DiskTensors,
    GroupTensors,
    HashWeights,
    JoinGroup,
    LeaveGroup,
    LoadWeights,
    NamedTensors,
    SharedTensors,
    UnloadWeights,
    UpdateWeights,
)
from sylvan.runtime.executor.sources import WeightSources
from sylvan.runtime.executor.update_groups import broadcast, make_group
from tests.parity.serving import Serving
from tests.support.random_model import write_random_model
from tests.support.updates import Shifting, as_bytes, carry_out, changed, weights_in

Weights = dict[str, torch.Tensor]
QUERY, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"
PROMPT = [5, 9, 150, 31]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module", params=[None, "w8a8"])
def serving(model_dir: Path, request: pytest.FixtureRequest) -> Iterator[Serving]:
    made = Serving(model_dir, runner="auto", options={"quantization": request.param})
    yield made
    made.close()


@pytest.fixture
def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture
def unchanged(serving: Serving) -> Iterator[None]:
    """Numbers and answers are the same after the test."""
    before = carry_out(serving, HashWeights())[0].body
    answer = serving.generate([PROMPT], max_new_tokens=4)
    yield
    assert carry_out(serving, HashWeights())[0].body == before
    assert serving.generate([PROMPT], max_new_tokens=4) == answer


def spoilt(weights: Weights, name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Weights:
    return weights | {name: change(weights[name]).contiguous()}


BAD: dict[str, tuple[Callable[[Weights], Weights], str]] = {
    "a number": (lambda w: spoilt(w, NORM, lambda t: t * torch.nan), "not finite"),
    "one that overflows": (
        lambda w: spoilt(w, QUERY, lambda t: torch.full_like(t, 1e300, dtype=torch.float64)),
        "not finite",
    ),
    "a shape": (lambda w: spoilt(w, QUERY, lambda t: t[:, 1:]), "has shape"),
    "a scalar": (lambda w: spoilt(w, NORM, lambda t: t[0]), "has shape []"),
    "integers": (lambda w: spoilt(w, QUERY, lambda t: t.long()), "int64"),
    "a foreign name": (lambda w: w | {"model.layers.99.x": w[NORM].clone()}, "does not use"),
    "one too few": (lambda w: {n: t for n, t in w.items() if n != QUERY}, "lacks the tensor"),
    "two of one": (lambda w: w | {"norm.weight": w[NORM] * 2}, "are two names of one parameter"),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.usefixtures("unchanged")
def test_tensors_that_do_not_fit(serving: Serving, model_dir: Path, name: str) -> None:
    change, says = BAD[name]
    source = as_bytes(change(changed(weights_in(model_dir))))

    [refused] = carry_out(serving, UpdateWeights(source, partial=name != "one too few"))

    assert refused.status == 400
    assert says in refused.error
    assert not refused.blocked


def test_numbers_that_change_while_they_are_written_stop_everything(
    serving: Serving, model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were checked, but are looked at again where they are rounded and packed."""
    old, new = weights_in(model_dir), changed(weights_in(model_dir))
    before = carry_out(serving, HashWeights())[0].body

    with monkeypatch.context() as patch:
        patch.setattr(WeightSources, "open", lambda self, source: Shifting(new, QUERY))
        [failed] = carry_out(serving, UpdateWeights(as_bytes(new)))

    assert failed.status == 500
    assert f"the weights of {QUERY!r} are not finite" in failed.error
    assert "failed midway" in failed.blocked
    [healed] = carry_out(serving, UpdateWeights(as_bytes(old), partial=False))
    assert (healed.error, healed.blocked) == ("", "")
    assert carry_out(serving, HashWeights())[0].body == before


@pytest.mark.parametrize("lacking", [1, 1000, 200_000, -7])
@pytest.mark.parametrize("way", ["body", "shared memory", "disk"])
@pytest.mark.usefixtures("unchanged")
def test_files_that_are_cut_off(
    serving: Serving, model_dir: Path, tmp_path: Path, way: str, lacking: int
) -> None:
    """By so many bytes, or after the first seven."""
    data = save(changed(weights_in(model_dir)))[:-lacking]
    if way == "body":
        source = BytesTensors(np.frombuffer(data, np.uint8))
    elif way == "shared memory":
        shared = Path("/dev/shm") / f"sylvan-test-{uuid.uuid4().hex}"
        shared.write_bytes(data)
        source = SharedTensors(shared.name, len(data))
    else:
        shutil.copytree(model_dir, tmp_path / "cut")
        (tmp_path / "cut" / "model.safetensors").write_bytes(data)
        source = DiskTensors(str(tmp_path / "cut"))

    [refused] = carry_out(serving, UpdateWeights(source, partial=way != "disk"))
    if way == "shared memory":
        shared.unlink()

    assert refused.status == 400
    assert any(word in refused.error for word in ("cut off", "truncated", "bytes, not"))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
@pytest.mark.usefixtures("unchanged")
def test_a_checkpoint_of_what_is_no_file(
    serving: Serving, model_dir: Path, tmp_path: Path, name: str, kind: str
) -> None:
    """Pipes and devices are rejected without reading them."""
    shutil.copytree(model_dir, tmp_path / "other")
    path = tmp_path / "other" / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()

    [refused] = carry_out(
        serving, UpdateWeights(DiskTensors(str(tmp_path / "other")), partial=False)
    )

    assert refused.status == 400
    assert "is not a regular file" in refused.error


@pytest.mark.usefixtures("unchanged")
def test_shared_memory_that_is_a_pipe(serving: Serving) -> None:
    path = Path("/dev/shm") / f"sylvan-test-{uuid.uuid4().hex}"
    os.mkfifo(path)
    try:
        [refused] = carry_out(serving, UpdateWeights(SharedTensors(path.name, 100)))
    finally:
        path.unlink()
    assert "is not a regular file" in refused.error


@pytest.mark.usefixtures("unchanged")
def test_a_trainer_that_is_lost_amid_its_broadcasts(
    serving: Serving, model_dir: Path, free_port: int
) -> None:
    new = changed(weights_in(model_dir))

    def train() -> None:
        group = make_group("127.0.0.1", free_port, 0, 2, "lost", timeout_s=20)
        for value in list(new.values())[:2]:
            broadcast(group, value)

    trainer = threading.Thread(target=train)
    trainer.start()
    shapes = tuple(tuple(value.shape) for value in new.values())
    source = GroupTensors("lost", tuple(new), ("float32",) * len(new), shapes)
    joined, refused = carry_out(
        serving,
        JoinGroup("lost", "127.0.0.1", free_port, 1, 2, timeout_s=20),
        UpdateWeights(source),
    )
    trainer.join()

    assert not joined.error
    assert "rank 0 of 'lost' did not send" in refused.error


@pytest.mark.parametrize("way", ["group", "bracket"])
def test_all_weights_may_come_in_float32_whatever_is_served(
    serving: Serving, model_dir: Path, free_port: int, way: str
) -> None:
    new = changed(weights_in(model_dir))
    old, source = as_bytes(weights_in(model_dir)), as_bytes(new)
    [done] = carry_out(serving, UpdateWeights(source, partial=False))
    assert not done.error
    want = carry_out(serving, HashWeights())[0].body
    assert not carry_out(serving, UpdateWeights(old, partial=False))[0].error

    def train() -> None:
        group = make_group("127.0.0.1", free_port, 0, 2, "whole", timeout_s=20)
        for value in new.values():
            broadcast(group, value)

    if way == "group":
        trainer = threading.Thread(target=train)
        trainer.start()
        shapes = tuple(tuple(value.shape) for value in new.values())
        group = GroupTensors("whole", tuple(new), ("float32",) * len(new), shapes)
        join = JoinGroup("whole", "127.0.0.1", free_port, 1, 2, timeout_s=20)
        commands = [join, UpdateWeights(group, partial=False), LeaveGroup("whole")]
    else:
        name = "kept"
        load = LoadWeights(name, source)
        commands = [load, UpdateWeights(NamedTensors(name), partial=False), UnloadWeights(name)]
    found = carry_out(serving, *commands)
    if way == "group":
        trainer.join()

    assert [result.error for result in found] == ["", "", ""]
    assert carry_out(serving, HashWeights())[0].body == want
    assert not carry_out(serving, UpdateWeights(old, partial=False))[0].error


@pytest.mark.parametrize("kind", ["qint8", "bits8", "complex64", "Tensor", "no_type"])
def test_types_that_no_weights_have(serving: Serving, free_port: int, kind: str) -> None:
    refusal = threading.Event()

    def train() -> None:
        group = make_group("127.0.0.1", free_port, 0, 2, kind, timeout_s=20)
        assert refusal.wait(60)  # a group that went before the other side is in it fails there
        del group

    trainer = threading.Thread(target=train)
    trainer.start()
    source = GroupTensors(kind, ("a",), (kind,), ((4,),))
    joined, refused = carry_out(
        serving, JoinGroup(kind, "127.0.0.1", free_port, 1, 2), UpdateWeights(source)
    )
    refusal.set()
    trainer.join()

    assert not joined.error
    assert refused.status == 400
    assert f"there is no type '{kind}'" in refused.error
