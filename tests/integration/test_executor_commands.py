"""Commands between steps: weights replaced in place, memory given back, regions, health."""

from __future__ import annotations

import contextlib
import mmap
import pickle
import re
import socket
import threading
from multiprocessing.shared_memory import SharedMemory

import numpy as np
import pytest
import torch
import zmq
from safetensors.torch import save, save_file

from sylvan.kernels.native.library import describe
from sylvan.protocol.commands import (
    BytesTensors,
    CheckHealth,
    DescribeMemory,
    DiskTensors,
    GroupTensors,
    HashWeights,
    JoinGroup,
    LeaveGroup,
    LoadWeights,
    NamedTensors,
    ReadWeights,
    ReleaseMemory,
    ResumeMemory,
    SharedTensors,
    SocketTensors,
    UnloadWeights,
    UpdateWeights,
)
from sylvan.protocol.errors import ExecutorError
from sylvan.runtime.executor.facts import read_facts
from sylvan.runtime.executor.update_groups import broadcast, make_group
from tests.parity.checkpoints import write
from tests.parity.families import DENSE, EXPERT
from tests.parity.rare import ALL
from tests.parity.serving import Serving
from tests.support.on_device import OnDevice
from tests.support.random_model import write_random_model
from tests.support.remote_executor import RemoteExecutor, codec
from tests.support.transfer import until
from tests.support.updates import PROMPTS, as_bytes, carry_out, changed, weights_in, write_changed

FORMATS = [
    ("eager", {}),
    ("auto", {}),
    ("auto", {"dtype": "bfloat16"}),
    ("auto", {"quantization": "w8a8"}),
]


@pytest.fixture(scope="module")
def old_dir(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("old"), context_len=256)


@pytest.fixture(scope="module")
def new_dir(tmp_path_factory, old_dir):
    return write_changed(old_dir, tmp_path_factory.mktemp("new"))


@pytest.fixture
def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def checksums(serving: Serving) -> dict[str, str]:
    [found] = carry_out(serving, HashWeights())
    assert not found.error
    return found.body["checksums"]


def remote(path, options):
    return RemoteExecutor(path, options), read_facts(path)


@pytest.mark.parametrize(("runner", "options"), FORMATS)
def test_after_an_update_all_is_as_in_a_fresh_executor(old_dir, new_dir, runner, options):
    serving = Serving(old_dir, runner=runner, options=options)
    fresh = Serving(new_dir, runner=runner, options=options)
    before, want = serving.generate(PROMPTS), fresh.generate(PROMPTS)
    assert before != want

    [result] = carry_out(serving, UpdateWeights(as_bytes(weights_in(new_dir))))

    assert result.body == {"num_tensors": len(weights_in(new_dir))}
    assert serving.generate(PROMPTS) == want
    assert checksums(serving) == checksums(fresh)
    carry_out(serving, UpdateWeights(DiskTensors(str(old_dir)), partial=False))
    assert serving.generate(PROMPTS) == before


def test_packed_weights_of_an_earlier_start_are_updated_and_given_back(old_dir, new_dir, tmp_path):
    options = {"load_cache": tmp_path / "cache"}
    before = Serving(old_dir, runner="auto", options=options).generate(PROMPTS)
    until(lambda: [*(tmp_path / "cache").glob("*.weights")])  # written while it serves
    [kept] = (tmp_path / "cache").iterdir()
    data = kept.read_bytes()
    serving = Serving(old_dir, runner="auto", options=options)
    assert serving.generate(PROMPTS) == before

    carry_out(serving, UpdateWeights(as_bytes(weights_in(new_dir))))
    assert serving.generate(PROMPTS) == Serving(new_dir, runner="auto").generate(PROMPTS)
    carry_out(serving, ReleaseMemory(("weights",)), ResumeMemory(("weights",)))
    carry_out(serving, UpdateWeights(DiskTensors(str(old_dir)), partial=False))

    assert serving.generate(PROMPTS) == before
    assert kept.read_bytes() == data


@pytest.mark.parametrize(("runner", "options"), FORMATS)
def test_parts_of_joined_matrices_are_replaced_alone(old_dir, new_dir, tmp_path, runner, options):
    new = weights_in(new_dir)
    part = {n: v for n, v in new.items() if "k_proj" in n or "up_proj" in n or "norm" in n}
    mixed = write_changed(old_dir, tmp_path)
    save_file(weights_in(old_dir) | part, mixed / "model.safetensors")
    serving = Serving(old_dir, runner=runner, options=options)
    fresh = Serving(mixed, runner=runner, options=options)

    [result] = carry_out(serving, UpdateWeights(as_bytes(part)))

    assert result.body == {"num_tensors": len(part)}
    assert checksums(serving) == checksums(fresh)
    assert serving.generate(PROMPTS) == fresh.generate(PROMPTS)


@pytest.mark.parametrize(
    ("family", "runner"),
    [
        ("gpt2", "auto"),
        ("falcon-40b", "eager"),
        ("gemma", "auto"),
        ("phi3", "auto"),
        ("bloom", "eager"),
    ],
)
def test_families_that_store_weights_in_their_own_way(family, runner, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    write(DENSE[family](), 1, one)
    write(DENSE[family](), 2, two)
    serving, fresh = Serving(one, runner=runner), Serving(two, runner=runner)
    serving.generate(PROMPTS)

    [result] = carry_out(serving, UpdateWeights(DiskTensors(str(two)), partial=False))

    assert not result.error
    assert serving.generate(PROMPTS) == fresh.generate(PROMPTS)


@pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled")
@pytest.mark.parametrize("family", ["lfm2", "qwen3-next", "mamba2", "jamba"])
def test_weights_of_recurrent_layers(family, tmp_path):
    weights_change_as_if_loaded(family, tmp_path, "program (")


@pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled")
def test_weights_of_programs_that_call_pytorch_back(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    weights_change_as_if_loaded("longcat-flash", tmp_path, ", PyTorch in ZeroMoE")


def weights_change_as_if_loaded(family, tmp_path, runner):
    one, two = tmp_path / "one", tmp_path / "two"
    write(ALL[family](), 1, one)
    write(ALL[family](), 2, two)
    serving, fresh = Serving(one, runner="auto"), Serving(two, runner="auto")
    serving.generate(PROMPTS)

    [result] = carry_out(serving, UpdateWeights(DiskTensors(str(two)), partial=False))

    assert runner in serving.facts.runner
    assert not result.error
    assert checksums(serving) == checksums(fresh)
    assert serving.generate(PROMPTS) == fresh.generate(PROMPTS)


@pytest.mark.parametrize(
    ("family", "quantization"), [("mixtral", "w8a8"), ("deepseek-v3", None), ("gpt-oss", "w8a8")]
)
def test_experts_and_latent_attention(family, quantization, tmp_path):
    config = EXPERT[family]()
    one, two = tmp_path / "one", tmp_path / "two"
    write(config, 1, one)
    write(config, 2, two)
    options = {"quantization": quantization}
    serving, fresh = (Serving(path, runner="auto", options=options) for path in (one, two))
    serving.generate(PROMPTS)

    [result] = carry_out(serving, UpdateWeights(DiskTensors(str(two)), partial=False))

    assert not result.error
    assert checksums(serving) == checksums(fresh)
    assert serving.generate(PROMPTS) == fresh.generate(PROMPTS)


@pytest.mark.parametrize("runner", ["auto", "eager"])
@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("lm_head.weight", torch.zeros(5, 64), r"'lm_head.weight' has shape \[5, 64\]"),
        ("lm_head.weight", torch.full((264, 64), torch.nan), "'lm_head.weight' are not finite"),
        ("lm_head.weight", torch.zeros(264, 64, dtype=torch.int32), "stored as torch.int32"),
        ("model.unheard.weight", torch.zeros(3), "'model.unheard.weight', which this"),
    ],
)
def test_a_bad_update_changes_nothing(old_dir, new_dir, runner, name, value, says):
    serving = Serving(old_dir, runner=runner)
    before = checksums(serving)

    bad = weights_in(new_dir) | {name: value}
    [result] = carry_out(serving, UpdateWeights(as_bytes(bad)))

    assert result.status == 400
    assert re.search(says, result.error)
    assert checksums(serving) == before


def test_a_whole_update_must_be_whole(old_dir, new_dir, tmp_path):
    weights = weights_in(new_dir)
    del weights["model.layers.1.mlp.down_proj.weight"]
    short = write_changed(old_dir, tmp_path)
    save_file(weights, short / "model.safetensors")
    serving = Serving(old_dir)
    before = checksums(serving)

    [result] = carry_out(serving, UpdateWeights(DiskTensors(str(short)), partial=False))

    assert "lacks the tensor 'model.layers.1.mlp.down_proj.weight'" in result.error
    assert checksums(serving) == before


def test_files_that_are_cut_off_or_no_safetensors(old_dir, new_dir):
    serving = Serving(old_dir)
    whole = np.frombuffer(save(weights_in(new_dir)), np.uint8)
    before = checksums(serving)

    for data in (whole[:-100], whole[:20], whole[:4], np.zeros(0, np.uint8)):
        [result] = carry_out(serving, UpdateWeights(BytesTensors(data)))
        assert result.status == 400
        assert "cut off" in result.error or "not a safetensors file" in result.error
    pickled = np.frombuffer(pickle.dumps(weights_in(new_dir)), np.uint8)
    [result] = carry_out(serving, UpdateWeights(BytesTensors(pickled)))
    assert "is a pickle, which could run code" in result.error

    assert checksums(serving) == before


def test_tied_embeddings_are_one_matrix(tmp_path):
    config = DENSE["gemma"]()
    one, two = tmp_path / "one", tmp_path / "two"
    write(config, 1, one)
    write(config, 2, two)
    serving, fresh = Serving(one, runner="auto"), Serving(two, runner="auto")
    new = weights_in(two)
    table = new["model.embed_tokens.weight"]

    differing = carry_out(serving, UpdateWeights(as_bytes(new | {"lm_head.weight": table + 1})))[0]
    alone = carry_out(serving, UpdateWeights(as_bytes({"lm_head.weight": table})))[0]
    both = carry_out(serving, UpdateWeights(as_bytes(new | {"lm_head.weight": table.clone()})))[0]

    assert "'lm_head.weight' is tied to 'embed_tokens.weight', but differs" in differing.error
    assert (
        "'lm_head.weight' is tied to 'embed_tokens.weight' in this model; send that" in alone.error
    )
    assert not both.error
    assert serving.generate(PROMPTS) == fresh.generate(PROMPTS)


def test_tensors_are_read_back_as_they_were_sent(old_dir, new_dir):
    new = weights_in(new_dir)
    serving = Serving(old_dir, runner="auto")
    carry_out(serving, UpdateWeights(as_bytes(new)))

    for name in ("model.layers.0.self_attn.v_proj.weight", "lm_head.weight", "model.norm.weight"):
        [found] = carry_out(serving, ReadWeights(name, most=7))
        assert found.body["shape"] == list(new[name].shape)
        assert torch.equal(torch.tensor(found.body["values"]), new[name][:7])
    [found] = carry_out(serving, ReadWeights("no.such"))
    assert found.error == "this model has no tensor 'no.such'"


def test_requests_under_way_continue_with_the_new_weights(old_dir, new_dir):
    serving, fresh = Serving(old_dir, runner="auto"), Serving(new_dir, runner="auto")
    rid = serving.add(PROMPTS[1], max_new_tokens=24, ignore_eos=True)
    while len(serving.tokens.get(rid, [])) < 6:
        serving.scheduler.step()
    serving.scheduler.pause("in_place")
    known = list(serving.tokens[rid])

    carry_out(serving, UpdateWeights(as_bytes(weights_in(new_dir))))
    serving.run()

    again = fresh.add(PROMPTS[1], outputs=known, max_new_tokens=24, ignore_eos=True)
    fresh.run()
    assert len(known) < 24
    assert serving.tokens[rid] == known + fresh.tokens[again]


def test_kv_is_kept_if_asked_for(old_dir, new_dir):
    serving, flushed = Serving(old_dir, runner="auto"), Serving(old_dir, runner="auto")
    update = as_bytes(weights_in(new_dir))
    for one, flush in ((serving, False), (flushed, True)):
        one.generate(PROMPTS)
        carry_out(one, UpdateWeights(update, flush=flush))

    assert serving.cache.cached_tokens > 0
    assert flushed.cache.cached_tokens == 0


def test_kept_tensors_are_put_into_force_at_once(old_dir, new_dir):
    new, serving = weights_in(new_dir), Serving(old_dir, runner="auto")
    before = checksums(serving)
    half = len(new) // 2
    parts = [dict(list(new.items())[:half]), dict(list(new.items())[half:])]

    for part in parts:
        [kept] = carry_out(serving, LoadWeights("next", as_bytes(part)))
        assert kept.body == {"num_tensors": len(part)}
    assert checksums(serving) == before
    update, dropped, gone = carry_out(
        serving,
        UpdateWeights(NamedTensors("next"), partial=False),
        UnloadWeights("next"),
        UpdateWeights(NamedTensors("next")),
    )

    assert update.body == dropped.body == {"num_tensors": len(new)}
    assert gone.error == "no weights are loaded under the name 'next'"
    assert checksums(serving) == checksums(Serving(new_dir, runner="auto"))


def test_no_more_is_kept_than_twice_the_model(old_dir, new_dir):
    serving = Serving(old_dir)
    results = carry_out(
        serving, *(LoadWeights(str(i), as_bytes(weights_in(new_dir))) for i in range(3))
    )

    assert [bool(result.error) for result in results] == [False, False, True]
    assert "twice the size of the model" in results[2].error


def test_shared_memory_is_read_in_place(old_dir, new_dir):
    data = save(weights_in(new_dir))
    memory = SharedMemory(create=True, size=len(data) + 1000)
    try:
        memory.buf[: len(data)] = data
        serving = Serving(old_dir, runner="auto")
        source = SharedTensors(memory.name, len(data))
        [result] = carry_out(serving, UpdateWeights(source))
        assert not result.error
        assert bytes(memory.buf[: len(data)]) == data
        assert checksums(serving) == checksums(Serving(new_dir, runner="auto"))

        wrong = carry_out(
            serving,
            UpdateWeights(SharedTensors(memory.name, 1 << 40)),
            UpdateWeights(SharedTensors("sylvan-none", 100)),
            UpdateWeights(SharedTensors("../etc/passwd", 100)),
        )
        says = ["bytes, not", "cannot be opened", "is not the name of shared memory"]
        assert all(say in result.error for say, result in zip(says, wrong, strict=True))
    finally:
        memory.close()
        memory.unlink()


def test_a_socket_gives_files_one_after_another(old_dir, new_dir, tmp_path):
    new = list(weights_in(new_dir).items())
    parts = [save(dict(new[:5])), save(dict(new[5:])), b""]
    address = f"ipc://{tmp_path}/weights"
    context = zmq.Context()
    trainer = context.socket(zmq.REP)
    trainer.bind(address)

    def give() -> None:
        for part in parts:
            assert trainer.recv() == b"next"
            trainer.send(part)

    giver = threading.Thread(target=give)
    giver.start()
    serving = Serving(old_dir, runner="auto")
    [result] = carry_out(serving, UpdateWeights(SocketTensors(address)))
    giver.join()
    trainer.close()
    context.term()

    assert result.body == {"num_tensors": len(new)}
    assert checksums(serving) == checksums(Serving(new_dir, runner="auto"))
    [refused] = carry_out(serving, UpdateWeights(SocketTensors("tcp://10.0.0.1:80")))
    assert "not a ZeroMQ socket of this machine" in refused.error


def test_a_trainer_broadcasts_to_a_group(old_dir, new_dir, free_port):
    new = changed(weights_in(old_dir), seed=9)
    bf16 = {name: value.to(torch.bfloat16) for name, value in new.items()}
    serving = Serving(old_dir, runner="auto")

    def train() -> None:
        group = make_group("127.0.0.1", free_port, 0, 2, "trainer")
        for value in bf16.values():
            broadcast(group, value)

    trainer = threading.Thread(target=train)
    trainer.start()
    source = GroupTensors(
        "trainer",
        tuple(bf16),
        ("torch.bfloat16",) * len(bf16),
        tuple(tuple(value.shape) for value in bf16.values()),
    )
    joined, updated, left, gone = carry_out(
        serving,
        JoinGroup("trainer", "127.0.0.1", free_port, 1, 2),
        UpdateWeights(source),
        LeaveGroup("trainer"),
        LeaveGroup("trainer"),
    )
    trainer.join()

    assert not joined.error + updated.error + left.error
    assert gone.error == "group_name 'trainer' was not joined"
    found = carry_out(serving, ReadWeights("lm_head.weight", most=1000))[0].body["values"]
    assert torch.equal(torch.tensor(found), bf16["lm_head.weight"].float())


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (JoinGroup("g", "127.0.0.1", 1, 1, 2, "nccl"), "backend must be gloo"),
        (JoinGroup("g", "127.0.0.1", 1, 0, 2), "rank_offset 0 must be in 1..1"),
        (JoinGroup("g", "127.0.0.1", 1, 1, 2, timeout_s=0.1), "did not form within 0.1 s"),
        (UpdateWeights(GroupTensors("g", (), (), ())), "'g' was not joined"),
    ],
)
def test_groups_that_cannot_be(old_dir, command, says):
    [result] = carry_out(Serving(old_dir), command)
    assert says in result.error


# ---- memory


def resident_pages(address: int, num_bytes: int) -> int:
    """Pages of this process that are in memory, of whole pages from `address` on."""
    start = -(-address // 4096)
    count = (address + num_bytes) // 4096 - start
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(8 * start)
        entries = np.frombuffer(file.read(8 * count), np.uint64)
    return int((entries >> np.uint64(63)).sum())


@pytest.mark.parametrize("runner", ["auto", "eager"])
def test_memory_is_given_back_and_live_requests_survive(old_dir, runner):
    alone = Serving(old_dir, runner=runner)
    want = alone.add(PROMPTS[1], max_new_tokens=24, ignore_eos=True)
    alone.run()
    serving = Serving(old_dir, runner=runner, pages=2000)
    rid = serving.add(PROMPTS[1], max_new_tokens=24, ignore_eos=True)
    while len(serving.tokens.get(rid, [])) < 6:
        serving.scheduler.step()
    [described] = carry_out(serving, DescribeMemory())
    [group] = described.body["kv_groups"]
    assert group["page_size"] == 16
    assert group["num_pages"] == 2001
    places = [(r["address"], r["stride"] * group["num_pages"]) for r in group["regions"]]
    assert sum(resident_pages(*place) for place in places)

    released, health = carry_out(serving, ReleaseMemory(), CheckHealth())
    assert not released.error
    assert set(released.body["released"]) == {"weights", "kv_cache", "graphs"}
    assert released.body["released_bytes"]["kv_cache"] >= 0.9 * sum(n for _, n in places)
    assert sum(resident_pages(*place) for place in places) == 0
    assert health.body["healthy"] is False
    for _ in range(5):
        serving.scheduler.step()
    assert len(serving.tokens[rid]) < 24

    first, second = carry_out(serving, ResumeMemory(("weights",)), ResumeMemory())
    assert first.blocked == "the memory of kv_cache, graphs has been released"
    assert not second.blocked
    serving.run()

    assert serving.tokens[rid] == alone.tokens[want]


def test_weights_that_came_from_no_disk_must_be_sent_again(old_dir, new_dir):
    serving = Serving(old_dir, runner="auto")
    new = weights_in(new_dir)
    _, _, resumed, refused, part, whole = carry_out(
        serving,
        UpdateWeights(as_bytes(new)),
        ReleaseMemory(("weights",)),
        ResumeMemory(("weights",)),
        ReadWeights("lm_head.weight"),
        UpdateWeights(as_bytes({"lm_head.weight": new["lm_head.weight"]})),
        UpdateWeights(as_bytes(new)),
    )

    assert resumed.blocked == "the memory of the weights has been released; update all weights"
    assert refused.error == resumed.blocked
    assert "lacks the tensor" in part.error
    assert not whole.error
    assert not whole.blocked
    assert serving.generate(PROMPTS) == Serving(new_dir, runner="auto").generate(PROMPTS)


def test_a_step_without_weights_fails_with_the_reason(old_dir):
    serving = Serving(old_dir, runner="auto")
    carry_out(serving, ReleaseMemory(("weights",)))
    serving.scheduler.resume()
    rid = serving.add(PROMPTS[0])
    serving.run()

    assert "the memory of weights has been released" in serving.finish[rid].message


# ---- everywhere


@pytest.mark.slow
def test_commands_cross_processes(old_dir, new_dir):
    there = Serving(old_dir, runner="auto", build=remote)
    here = Serving(new_dir, runner="auto")
    try:
        there.generate(PROMPTS)
        [result] = carry_out(there, UpdateWeights(as_bytes(weights_in(new_dir))))
        assert not result.error
        assert there.generate(PROMPTS) == here.generate(PROMPTS)
        assert checksums(there) == checksums(here)
    finally:
        there.close()


@pytest.mark.parametrize("data", [b"", b"\xc1", codec().encode(CheckHealth())[:-3], b"\x90"])
def test_malformed_commands_are_refused(data):
    with pytest.raises(ExecutorError, match="malformed"):
        codec().command(data)


@pytest.mark.slow
@pytest.mark.parametrize("graph", [True, False])
def test_a_device_takes_the_same_commands(old_dir, new_dir, graph):
    serving = Serving(old_dir, build=OnDevice(graph=graph), overlap=True)
    fresh = Serving(new_dir, build=OnDevice(graph=graph), overlap=True)
    before, want = serving.generate(PROMPTS), fresh.generate(PROMPTS)
    assert before != want

    results = carry_out(serving, UpdateWeights(as_bytes(weights_in(new_dir))))
    assert serving.generate(PROMPTS) == want
    results += carry_out(serving, ReleaseMemory())
    results += carry_out(serving, ResumeMemory())
    assert results[-1].blocked.endswith("update all weights")
    results += carry_out(serving, UpdateWeights(DiskTensors(str(old_dir)), partial=False))

    assert not [result.error for result in results if result.error]
    assert serving.generate(PROMPTS) == before


@pytest.mark.parametrize("overlap", [True, False])
def test_commands_run_after_the_steps_in_flight(old_dir, new_dir, overlap):
    serving = Serving(old_dir, runner="auto", overlap=overlap)
    rids = [serving.add(prompt, max_new_tokens=12, ignore_eos=True) for prompt in PROMPTS]
    for _ in range(4):
        serving.scheduler.step()
    [result] = carry_out(serving, UpdateWeights(as_bytes(weights_in(new_dir)), abort=True))

    assert not result.error
    assert {serving.finish[rid].message for rid in rids} == {"the weights were replaced"}
    serving.run()
    assert serving.generate(PROMPTS) == Serving(new_dir, runner="auto").generate(PROMPTS)


def test_pages_of_address_space_are_counted_right():
    pages = 1024
    with mmap.mmap(-1, pages * mmap.PAGESIZE) as memory:
        with contextlib.suppress(OSError):  # a kernel without huge pages refuses
            memory.madvise(mmap.MADV_NOHUGEPAGE)  # one makes its neighbours resident
        memory[: 256 * mmap.PAGESIZE] = bytes([1]) * (256 * mmap.PAGESIZE)
        view = np.frombuffer(memory, np.uint8)
        try:
            assert resident_pages(view.ctypes.data, len(view)) == 256
        finally:
            del view
