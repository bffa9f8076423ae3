"""`sylvan.Engine` while its weights change and its memory is given back."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq
from safetensors.torch import save

from sylvan.protocol.errors import RequestError
from sylvan.runtime.engine.engine import Engine
from sylvan.runtime.executor.update_groups import broadcast, make_group
from tests.support.random_model import write_random_model
from tests.support.updates import changed, weights_in, write_changed

GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
LONG = {**GREEDY, "max_new_tokens": 200}
PROMPTS = [[5, 9, 150, 31], [7] * 37]


@pytest.fixture(scope="module")
def old_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("old"), context_len=512)


@pytest.fixture(scope="module")
def new_dir(tmp_path_factory: pytest.TempPathFactory, old_dir: Path) -> Path:
    return write_changed(old_dir, tmp_path_factory.mktemp("new"))


@pytest.fixture(scope="module")
def answers(old_dir: Path, new_dir: Path) -> list[list[list[int]]]:
    """Of the old weights, and of the new."""
    found = []
    for path in (old_dir, new_dir):
        with start(path) as engine:
            found.append(ids(engine))
    assert found[0] != found[1]
    return found


@pytest.fixture
def engine(old_dir: Path) -> Iterator[Engine]:
    with start(old_dir) as engine:
        yield engine


def start(model: Path, **keywords: Any) -> Engine:
    known = {"device": "cpu", "threads": 1, "max_total_tokens": 4096}
    return Engine(model_path=str(model), **(known | keywords))


def ids(engine: Engine) -> list[list[int]]:
    replies: Any = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
    return [reply["output_ids"] for reply in replies]


def versions(engine: Engine) -> set[str]:
    replies: Any = engine.generate(input_ids=PROMPTS, sampling_params=GREEDY)
    return {reply["meta_info"]["weight_version"] for reply in replies}


def test_tensors_replace_weights_and_name_them(
    engine: Engine, new_dir: Path, answers: list[Any]
) -> None:
    assert ids(engine) == answers[0]
    assert versions(engine) == {"default"}

    done = engine.update_weights_from_tensor(
        list(weights_in(new_dir).items()), weight_version="step-1"
    )

    assert done == (True, "")
    assert ids(engine) == answers[1]
    assert versions(engine) == {"step-1"}


def test_checkpoints_replace_weights(
    engine: Engine, old_dir: Path, new_dir: Path, answers: list[Any]
) -> None:
    assert engine.update_weights_from_disk(str(new_dir), weight_version="new") == (True, "")
    assert ids(engine) == answers[1]
    assert engine.update_weights_from_disk(str(old_dir)) == (True, "")
    assert ids(engine) == answers[0]
    assert versions(engine) == {"new"}


def test_a_refused_update_leaves_the_old_weights_and_their_label(
    engine: Engine, new_dir: Path, answers: list[Any], tmp_path: Path
) -> None:
    bad = weights_in(new_dir) | {"lm_head.weight": torch.full((264, 64), torch.inf)}
    (tmp_path / "empty").mkdir()

    outcomes = [
        engine.update_weights_from_tensor(bad, weight_version="bad"),
        engine.update_weights_from_tensor({}, weight_version="bad"),
        engine.update_weights_from_disk(str(tmp_path / "none"), weight_version="bad"),
        engine.update_weights_from_disk(str(tmp_path / "empty"), weight_version="bad"),
    ]

    assert [ok for ok, _ in outcomes] == [False] * 4
    assert "'lm_head.weight' are not finite" in outcomes[0][1]
    assert outcomes[1][1] == "the update contains no tensors"
    assert "is not a directory" in outcomes[2][1]
    assert ids(engine) == answers[0]
    assert versions(engine) == {"default"}
    with pytest.raises(RequestError, match="the engine takes no speed here"):
        engine.update_weights_from_disk(str(new_dir), speed=2)


def test_several_calls_are_one_update(
    engine: Engine, new_dir: Path, answers: list[Any], tmp_path: Path
) -> None:
    new = list(weights_in(new_dir).items())
    with pytest.raises(RequestError, match="no update was begun"):
        engine.end_weight_update()
    engine.begin_weight_update()
    with pytest.raises(RequestError, match="contains no tensors"):
        engine.end_weight_update()

    engine.begin_weight_update()
    assert engine.update_weights_from_tensor(changed(dict(new), seed=8)) == (True, "")
    engine.begin_weight_update()  # forgets these
    for part in (new[:5], new[5:]):
        assert engine.update_weights_from_tensor(part) == (True, "")
        assert ids(engine) == answers[0]
    assert engine.end_weight_update() == (True, "")

    assert ids(engine) == answers[1]


def test_no_shared_memory_is_left_behind(engine: Engine, new_dir: Path) -> None:
    before = set(Path("/dev/shm").glob("sylvan-update-*"))
    engine.update_weights_from_tensor(weights_in(new_dir))
    engine.update_weights_from_tensor({"no.such": torch.zeros(3)})
    assert set(Path("/dev/shm").glob("sylvan-update-*")) <= before


def test_tensors_are_read_and_hashed(engine: Engine, new_dir: Path) -> None:
    new = weights_in(new_dir)
    before = engine.check_weights()
    engine.update_weights_from_tensor({"lm_head.weight": new["lm_head.weight"]})
    after = engine.check_weights()

    assert {name for name in after if after[name] != before[name]} == {"lm_head.weight"}
    assert "lm_head.weight" not in engine.check_weights(["lm_head.weight"])
    rows = engine.get_weights_by_name("lm_head.weight", truncate_size=3)
    assert torch.equal(torch.tensor(rows), new["lm_head.weight"][:3])
    with pytest.raises(RequestError, match="no tensor 'x'"):
        engine.get_weights_by_name("x")


def test_weights_come_through_a_group(engine: Engine, old_dir: Path) -> None:
    new = changed(weights_in(old_dir), seed=5)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    joined = threading.Event()
    flat = torch.cat([value.reshape(-1).view(torch.uint8) for value in new.values()])

    def train() -> None:
        group = make_group("127.0.0.1", port, 0, 2, "g")
        joined.set()
        for value in new.values():
            broadcast(group, value)
        broadcast(group, flat)

    trainer = threading.Thread(target=train)
    trainer.start()
    place = {"master_address": "127.0.0.1", "master_port": port, "group_name": "g"}
    assert engine.init_weights_update_group(**place, rank_offset=1, world_size=2) == (True, "")
    joined.wait(60)
    about = [list(new), [v.dtype for v in new.values()], [list(v.shape) for v in new.values()]]
    assert engine.update_weights_from_distributed(*about, group_name="g") == (True, "")
    one = engine.check_weights()
    assert engine.update_weights_from_distributed(
        *about, group_name="g", load_format="flattened_bucket"
    ) == (True, "")
    trainer.join()
    assert engine.destroy_weights_update_group("g") == (True, "")
    assert engine.destroy_weights_update_group("g")[0] is False

    assert engine.check_weights() == one
    rows = engine.get_weights_by_name("lm_head.weight", truncate_size=1000)
    assert torch.equal(torch.tensor(rows), new["lm_head.weight"])


def test_weights_come_from_a_socket_of_this_machine(
    engine: Engine, new_dir: Path, answers: list[Any], tmp_path: Path
) -> None:
    address, data = f"ipc://{tmp_path}/s", save(weights_in(new_dir))
    with zmq.Context() as context, context.socket(zmq.REP) as giver:
        giver.bind(address)

        def give(parts: list[bytes]) -> None:
            for part in parts:
                giver.recv()
                giver.send(part)

        for parts, want in (([data[:-9]], answers[0]), ([data, b""], answers[1])):
            thread = threading.Thread(target=give, args=(parts,))
            thread.start()
            done, why = engine.update_weights_from_ipc({"0": address})
            thread.join()
            assert done == (want == answers[1]), why
            assert ids(engine) == want


async def test_a_stream_continues_through_updates_and_tells_their_labels(
    engine: Engine, new_dir: Path
) -> None:
    stream: Any = await engine.async_generate(
        input_ids=PROMPTS[1], sampling_params=LONG, stream=True
    )
    last: Any = None
    async for reply in stream:
        if last is None:
            update = asyncio.to_thread(
                engine.update_weights_from_tensor, weights_in(new_dir), weight_version="two"
            )
            assert await update == (True, "")
        last = reply

    assert len(last["output_ids"]) == 200
    meta = last["meta_info"]
    assert meta["weight_version"] == "two"
    assert meta["weight_versions"] == ["default", "two"]
    with start(new_dir) as fresh:
        # the last tokens are those of the new weights after all that came before
        known = last["output_ids"][:-20]
        again: Any = fresh.generate(
            input_ids=[*PROMPTS[1], *known], sampling_params={**GREEDY, "max_new_tokens": 20}
        )
    assert again["output_ids"] == last["output_ids"][-20:]


async def test_a_stream_survives_the_release_of_all_memory(engine: Engine, old_dir: Path) -> None:
    with start(old_dir) as fresh:
        want: Any = fresh.generate(input_ids=PROMPTS[1], sampling_params=LONG)
    stream: Any = await engine.async_generate(
        input_ids=PROMPTS[1], sampling_params=LONG, stream=True
    )
    last: Any = None
    async for reply in stream:
        if last is None:
            released = await asyncio.to_thread(engine.release_memory_occupation)
            assert set(released["released"]) == {"weights", "kv_cache", "graphs"}
            assert min(released["released_bytes"].values()) > 0
            with pytest.raises(RequestError, match="has been released"):
                await asyncio.to_thread(engine.get_weights_by_name, "lm_head.weight")
            resumed = await asyncio.to_thread(engine.resume_memory_occupation)
            assert resumed["released"] == []
        last = reply

    assert last["output_ids"] == want["output_ids"]


def test_unknown_tags_are_refused(engine: Engine) -> None:
    with pytest.raises(RequestError, match="tags"):
        engine.release_memory_occupation(["gpu"])
    assert len(ids(engine)) == 2
