"""Weights of two ranks: from groups, sockets and files, read back whole, all or nothing."""

from __future__ import annotations

import asyncio
import math
import socket
import threading
from pathlib import Path

import pytest
import torch
import zmq
from safetensors.torch import save, save_file

from sylvan.config.tree import ParallelConfig
from sylvan.protocol.commands import (
    DiskTensors,
    GroupTensors,
    HashWeights,
    JoinGroup,
    LeaveGroup,
    LoadWeights,
    NamedTensors,
    ReadWeights,
    SocketTensors,
    UpdateWeights,
)
from sylvan.runtime.engine.runtime import Runtime
from sylvan.runtime.executor.sources import SHARED
from sylvan.runtime.executor.update_groups import broadcast, make_group
from tests.parity.serving import Serving
from tests.support.random_model import write_random_model
from tests.support.ranks import build_ranks
from tests.support.tiny import tiny_config
from tests.support.updates import PROMPTS, as_bytes, carry_out, weights_in, write_changed


@pytest.fixture(scope="module")
def old_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("old"))


@pytest.fixture(scope="module")
def new_dir(old_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_changed(old_dir, tmp_path_factory.mktemp("new"))


@pytest.fixture
def two(old_dir: Path):
    serving = Serving(old_dir, build=build_ranks(2))
    yield serving
    serving.close()
    assert serving.executor.lost == []


@pytest.fixture
def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def checksums(serving: Serving) -> dict[str, str]:
    [found] = carry_out(serving, HashWeights())
    return found.body["checksums"]


def answers_as(serving: Serving, folder: Path) -> None:
    fresh = Serving(folder, build=build_ranks(2))
    assert checksums(serving) == checksums(fresh)
    assert serving.generate(PROMPTS) == fresh.generate(PROMPTS)
    fresh.close()


@pytest.mark.parametrize("flat", [pytest.param(False, marks=pytest.mark.slow), True])
def test_from_a_group_in_which_each_rank_has_a_place(two, new_dir, free_port, flat):
    new = weights_in(new_dir)

    def train() -> None:
        group = make_group("127.0.0.1", free_port, 0, 3, "trainer")
        if flat:
            raw = [value.contiguous().view(-1).view(torch.uint8) for value in new.values()]
            broadcast(group, torch.cat(raw))
        for value in () if flat else new.values():
            broadcast(group, value)

    trainer = threading.Thread(target=train)
    trainer.start()
    kinds = tuple(str(value.dtype) for value in new.values())
    shapes = tuple(tuple(value.shape) for value in new.values())
    joined, updated, left = carry_out(
        two,
        JoinGroup("trainer", "127.0.0.1", free_port, 1, 3),
        UpdateWeights(GroupTensors("trainer", tuple(new), kinds, shapes, flat)),
        LeaveGroup("trainer"),
    )
    trainer.join()

    assert (joined.error, updated.error, left.error) == ("", "", "")
    answers_as(two, new_dir)


@pytest.mark.parametrize("kept", [pytest.param(False, marks=pytest.mark.slow), True])
def test_from_a_socket_which_gives_each_file_once(two, new_dir, tmp_path, kept):
    new, address = weights_in(new_dir), f"ipc://{tmp_path}/socket"
    names = [*new]
    asked: list[bytes] = []

    def train() -> None:
        rep = zmq.Context.instance().socket(zmq.REP)
        rep.setsockopt(zmq.RCVTIMEO, 20_000)
        with rep:
            rep.bind(address)
            for start in range(0, len(names), 5):
                asked.append(rep.recv())
                rep.send(save({name: new[name] for name in names[start : start + 5]}))
            asked.append(rep.recv())
            rep.send(b"")

    trainer = threading.Thread(target=train)
    trainer.start()
    before = {*SHARED.glob("sylvan-weights-*")}
    source = SocketTensors(address)
    commands = (UpdateWeights(source),)
    if kept:
        commands = LoadWeights("mine", source), UpdateWeights(NamedTensors("mine"))
    results = carry_out(two, *commands)
    trainer.join()

    assert [found.error for found in results] == [""] * len(commands)
    assert asked == [b"next"] * (math.ceil(len(names) / 5) + 1)
    assert {*SHARED.glob("sylvan-weights-*")} == before, "the copy is gone"
    answers_as(two, new_dir)


@pytest.mark.slow
def test_rounded_as_a_fresh_server_rounds(old_dir, new_dir):
    """The scale of a row is that of all of its inputs, of which each rank has some."""
    old, fresh = (
        Serving(path, build=build_ranks(2), options={"quantization": "w8a8"})
        for path in (old_dir, new_dir)
    )

    [updated] = carry_out(old, UpdateWeights(as_bytes(weights_in(new_dir))))

    assert not updated.error
    assert checksums(old) == checksums(fresh)
    assert old.generate(PROMPTS) == fresh.generate(PROMPTS)
    old.close()
    fresh.close()


def test_whole_tensors_are_read_back(two, old_dir):
    for name, value in weights_in(old_dir).items():
        [found] = carry_out(two, ReadWeights(name, most=33))
        assert not found.error
        assert found.body["shape"] == list(value.shape)
        assert torch.equal(torch.tensor(found.body["values"]), value[:33].float()), name
    [unknown] = carry_out(two, ReadWeights("nothing"))
    assert "no tensor 'nothing'" in unknown.error


WRONG = {
    "a number of the first rank": ("o_proj", lambda w: w[0].fill_(math.nan), "not finite"),
    "a number of the second rank": ("o_proj", lambda w: w[-1, -1:].fill_(math.nan), "not finite"),
    "a shape": ("q_proj", lambda w: w.resize_(w.shape[0], w.shape[1] - 1), "has shape"),
}


@pytest.mark.parametrize(
    ("way", "name"),
    [
        ("bytes", "a number of the second rank"),
        pytest.param("bytes", "a number of the first rank", marks=pytest.mark.slow),
        pytest.param("bytes", "a shape", marks=pytest.mark.slow),
        pytest.param("files", "a number of the second rank", marks=pytest.mark.slow),
        pytest.param("group", "a number of the second rank", marks=pytest.mark.slow),
    ],
)
def test_what_is_wrong_on_one_rank_changes_nothing_on_any(
    two, old_dir, new_dir, tmp_path, free_port, name, way
):
    part, spoil, _ = WRONG[name]
    new = weights_in(new_dir)
    spoil(new[next(n for n in new if part in n)])
    before = checksums(two)
    if way == "bytes":
        source = as_bytes(new)
    elif way == "files":
        write_changed(old_dir, tmp_path)
        save_file(new, tmp_path / "model.safetensors")
        source = DiskTensors(str(tmp_path))
    else:

        def train() -> None:
            group = make_group("127.0.0.1", free_port, 0, 3, "trainer")
            for value in new.values():
                broadcast(group, value)

        trainer = threading.Thread(target=train)
        trainer.start()
        assert not carry_out(two, JoinGroup("trainer", "127.0.0.1", free_port, 1, 3))[0].error
        shapes = tuple(tuple(value.shape) for value in new.values())
        kinds = tuple(str(value.dtype) for value in new.values())
        source = GroupTensors("trainer", tuple(new), kinds, shapes)

    [refused] = carry_out(two, UpdateWeights(source))

    assert part in refused.error
    assert checksums(two) == before
    [again] = carry_out(two, UpdateWeights(as_bytes(weights_in(new_dir))))
    assert not again.error
    answers_as(two, new_dir)


@pytest.mark.slow
async def test_processes_are_updated_by_a_group_and_refuse_together(old_dir, new_dir, free_port):
    config = tiny_config(old_dir, load_format="auto", parallel=ParallelConfig(tp=2))
    runtime = await Runtime.start(config)
    try:
        updates, new = runtime.manager.updates, weights_in(new_dir)
        shapes = tuple(tuple(value.shape) for value in new.values())
        source = GroupTensors("g", tuple(new), ("float32",) * len(new), shapes)
        wrong = {name: value.clone() for name, value in new.items()}
        spoilt = next(name for name in wrong if "o_proj" in name)
        wrong[spoilt][0, -1] = math.inf  # in the share of the second rank

        def train() -> None:
            group = make_group("127.0.0.1", free_port, 0, 3, "g")
            for value in (*wrong.values(), *new.values()):
                broadcast(group, value)

        trainer = asyncio.create_task(asyncio.to_thread(train))
        joined = await updates.send(JoinGroup("g", "127.0.0.1", free_port, 1, 3))
        refused = await updates.update(UpdateWeights(source, version="wrong"))
        updated = await updates.update(UpdateWeights(source, version="new"))
        await trainer
        read = await runtime.manager.control(ReadWeights(spoilt, most=1000))

        assert joined.ok, joined.message
        assert spoilt in refused.message
        assert updated.ok, updated.message
        assert torch.equal(torch.tensor(read.body["values"]), new[spoilt])
        assert [c.weight_version for c in runtime.manager.router.clients] == ["new"]
    finally:
        await runtime.close()
