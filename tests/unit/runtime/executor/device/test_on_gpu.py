"""A real GPU, by its own kernels, gives what the CPU's own path gives; run with `--device cuda`.

Weights are float32: what two orders of summing differ by decides no token here.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from sylvan.protocol.errors import ConfigError
from sylvan.protocol.requests import LogprobOptions
from sylvan.runtime.executor.build import build_executor
from sylvan.runtime.executor.options import ExecutorParts
from sylvan.runtime.features.standard_workers import STANDARD_WORKERS
from sylvan.runtime.platform.accelerator import DeviceGraph
from sylvan.runtime.platform.find import load_kinds, open_platform
from sylvan.runtime.pool.mha import KVShape, MHAPool
from sylvan.runtime.pool.transfers import DeviceTransfers
from tests.parity.serving import Serving
from tests.support.chosen import device_name
from tests.support.random_model import write_random_model
from tests.support.rhymes import Rhymes, constrained

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 9, 200, 31], [7] * 37, list(range(40, 150)), [9, 8, 7, 6, 5]]
SAMPLED = {"temperature": 0.9, "top_p": 0.9, "top_k": 40, "max_new_tokens": 12}
PENALISED = {"frequency_penalty": 0.8, "repetition_penalty": 1.3}
FAR_TOO_MUCH = 1 << 45  # bytes
OVERLAP = pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
GRAPHS = pytest.mark.parametrize("graph", [False, True], ids=["eager", "graphs"])


@pytest.fixture(scope="module")
def gpu():
    return open_platform(load_kinds(())[device_name()])


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("model"), context_len=256)


@pytest.fixture(scope="module")
def expected(model_dir):
    serving = Serving(model_dir)
    return {
        "greedy": serving.generate(PROMPTS),
        "sampled": serving.generate(PROMPTS, **SAMPLED),
        "penalised": serving.generate(PROMPTS, **PENALISED),
    }


@pytest.fixture
def replayed(monkeypatch):
    """Grows by one with each graph that is replayed."""
    seen, replay = [], DeviceGraph.replay

    def counted(graph):
        seen.append(graph)
        replay(graph)

    monkeypatch.setattr(DeviceGraph, "replay", counted)
    return seen


def serve(model_dir, gpu, *, graph=True, overlap=True, parts=None, options=None, **limits):
    def build(path, local):
        return build_executor(
            path, local, parts=parts or ExecutorParts(STANDARD_WORKERS), platform=gpu
        )

    return Serving(
        model_dir,
        overlap=overlap,
        runner="graph" if graph else "eager",
        options={"device": gpu.facts.name} | (options or {}),
        build=build,
        **limits,
    )


def watch(serving) -> list[tuple[int, int, int]]:
    """Page copies of all steps to come."""
    launch, copies = serving.executor.launch, []

    def watched(batch):
        copies.extend(batch.copies)
        return launch(batch)

    serving.executor.launch = watched
    return copies


@OVERLAP
@GRAPHS
def test_answers_are_those_of_the_cpu(model_dir, gpu, expected, replayed, overlap, graph):
    serving = serve(model_dir, gpu, overlap=overlap, graph=graph)

    assert serving.facts.runner == ("graph" if graph else "eager")
    assert serving.generate(PROMPTS) == expected["greedy"]
    assert serving.generate(PROMPTS, **SAMPLED) == expected["sampled"]
    assert serving.generate(PROMPTS, **PENALISED) == expected["penalised"]
    assert (len(replayed) > 20) == graph


@pytest.mark.parametrize(("attention", "graph"), [("torch", False), ("dense", True)])
def test_other_attention_gives_the_same(model_dir, gpu, expected, attention, graph):
    serving = serve(model_dir, gpu, graph=graph, options={"attention": attention})

    assert serving.generate(PROMPTS) == expected["greedy"]


@GRAPHS
def test_small_steps_and_little_memory_change_nothing(model_dir, gpu, graph):
    tight = {"max_batch_tokens": 24, "max_running_reqs": 3, "pages": 9, "conservativeness": 0.0}
    serving = serve(model_dir, gpu, graph=graph, **tight)
    asked = {"max_new_tokens": 60, "frequency_penalty": 0.1}

    found = serving.generate(PROMPTS[:2], **asked)

    assert found == Serving(model_dir).generate(PROMPTS[:2], **asked)
    assert serving.scheduler.load().retractions > 0


def test_an_urgent_request_takes_the_place_of_others(model_dir, gpu):
    plain, serving = Serving(model_dir), serve(model_dir, gpu, pages=12)
    wanted = plain.generate(PROMPTS[:2], max_new_tokens=60)
    wanted += plain.generate(PROMPTS[2:3], max_new_tokens=20)
    rids = [serving.add(prompt, max_new_tokens=60) for prompt in PROMPTS[:2]]
    for _ in range(12):
        serving.scheduler.step()
    rids.append(serving.add(PROMPTS[2], max_new_tokens=20, priority=100))
    serving.run()

    assert [serving.tokens[rid] for rid in rids] == wanted
    assert serving.scheduler.load().retractions > 0


def test_who_leaves_early_disturbs_no_other(model_dir, gpu, expected):
    serving = serve(model_dir, gpu)
    rids = [serving.add(prompt) for prompt in PROMPTS]
    for _ in range(5):
        serving.scheduler.step()
    serving.scheduler.abort(rids[1])
    late = serving.add(PROMPTS[1])
    serving.run()

    found = [serving.tokens[rid] for rid in (rids[0], late, *rids[2:])]
    assert found == expected["greedy"]
    assert serving.finish[rids[1]].type == "abort"
    assert serving.scheduler.audit() == 0


@GRAPHS
def test_cached_prefixes_and_copied_pages_change_nothing(model_dir, gpu, graph):
    first = list(range(40, 100))
    prompts = [first, [*first[:41], 7, 8, 9], [*first[:50], *([3] * 20)]]
    wanted = [Serving(model_dir).generate([prompt])[0] for prompt in prompts]
    serving = serve(model_dir, gpu, graph=graph)
    copies = watch(serving)

    found = serving.generate(prompts[:1]) + serving.generate(prompts[1:])

    assert found == wanted
    assert serving.scheduler.load().cached_prompt_tokens > 80
    assert copies, "pages were to be divided"


def test_bias_and_early_stops_are_kept(model_dir, gpu, expected):
    first, second = (tokens[0] for tokens in expected["greedy"][:2])
    asked = {
        "logit_bias": {str(first): -100.0, "3": 2.0},
        "stop_token_ids": (second,),
        "min_new_tokens": 4,
    }

    found = serve(model_dir, gpu).generate(PROMPTS, **asked)

    assert found == Serving(model_dir).generate(PROMPTS, **asked)
    assert found[0][0] != first
    assert second not in found[1][:4]


def test_log_probabilities_are_those_of_the_cpu(model_dir, gpu):
    options = LogprobOptions(top=3, start=2, token_ids=(4, 5))
    found = []
    for serving in (Serving(model_dir), serve(model_dir, gpu)):
        rid = serving.add(PROMPTS[1], logprobs=options, temperature=0.8)
        serving.run()
        found.append(serving.outputs[rid])
    for mine, theirs in zip(*found, strict=True):
        for name in ("logprobs", "prompt_logprobs"):
            a, b = getattr(mine, name), getattr(theirs, name)
            assert (a is None) == (b is None)
            if a is None:
                continue
            for part in ("token_ids", "logprobs", "top_ids", "top_logprobs", "chosen_logprobs"):
                np.testing.assert_allclose(getattr(a, part), getattr(b, part), atol=1e-4)


@OVERLAP
def test_constraints_see_the_same_tokens_as_on_the_cpu(model_dir, gpu, overlap):
    prompts = [[5, 9, 200, 31], [7] * 17, list(range(40, 60))]

    def build(path, local):
        return build_executor(path, local, parts=constrained(Rhymes()))

    rhymes, plain = Rhymes(), Serving(model_dir, build=build)
    serving = serve(model_dir, gpu, overlap=overlap, parts=constrained(rhymes))
    for way in ({}, {"temperature": 1.1}, {"frequency_penalty": 1.0, "temperature": 1.5}):
        asked = way | {"max_new_tokens": 30}
        assert serving.generate(prompts, **asked) == plain.generate(prompts, **asked)

    assert {"certain", "replaced"} <= rhymes.kinds


def test_processors_of_others_may_change_logits(model_dir, gpu):
    def forbid_all_but_seven(logits, batch):
        kept = logits[:, 7].clone()
        logits.fill_(float("-inf"))
        logits[:, 7] = kept

    def forbid_slot(logits, batch):
        logits[torch.from_numpy(batch.slots == 1).to(logits.device)] = float("-inf")

    serving = serve(
        model_dir, gpu, parts=ExecutorParts(STANDARD_WORKERS, custom=(forbid_all_but_seven,))
    )
    assert serving.generate([[1, 2, 3]], max_new_tokens=3) == [[7, 7, 7]]

    serving = serve(model_dir, gpu, parts=ExecutorParts(STANDARD_WORKERS, custom=(forbid_slot,)))
    rids = [serving.add(prompt, max_new_tokens=2) for prompt in PROMPTS[:2]]
    serving.run()
    assert {serving.finish[rid].type for rid in rids} == {"length", "abort"}
    assert any("no token is valid" in serving.finish[rid].message for rid in rids)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "limit"),
    [
        ("float32", "fp8_e4m3", 0.3),
        ("bfloat16", "model", 0.06),
        ("bfloat16", "fp8_e4m3", 0.3),
        ("float16", "model", 0.01),
    ],
)
def test_other_types_come_near(model_dir, gpu, dtype, kv_dtype, limit):
    options = {"dtype": dtype, "kv_dtype": kv_dtype}
    if kv_dtype != "model" and gpu.facts.float8_of(gpu.chip) is None:
        with pytest.raises(ConfigError, match="does not compute with such numbers"):
            serve(model_dir, gpu, options=options)
        return
    found = []
    for serving in (Serving(model_dir), serve(model_dir, gpu, options=options)):
        rid = serving.add(PROMPTS[2], logprobs=LogprobOptions(start=1))
        serving.run()
        parts = [out.prompt_logprobs for out in serving.outputs[rid] if out.prompt_logprobs]
        found.append(np.concatenate([part.logprobs for part in parts])[1:])  # the first has none

    numbers = 128 * (1 if kv_dtype != "model" else getattr(torch, dtype).itemsize)
    assert serving.facts.kv_bytes_per_token == numbers
    assert len(found[0]) >= 100
    assert 1e-6 < np.abs(found[0] - found[1]).max() < limit


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_launching_does_not_wait(model_dir, gpu):
    serving = serve(model_dir, gpu)
    ways = ({}, SAMPLED, PENALISED, {"logit_bias": {"3": 2.0}})
    wanted = [serving.generate(PROMPTS, **way) for way in ways]  # what is compiled is compiled now
    launch = serving.executor.launch

    def guarded(batch):
        with gpu.unsynced():
            return launch(batch)

    serving.executor.launch = guarded
    assert [serving.generate(PROMPTS, **way) for way in ways] == wanted
    one = torch.ones(1, device=gpu.device)
    with gpu.unsynced(), pytest.raises(RuntimeError, match="synchron"):
        one.item()


@OVERLAP
@pytest.mark.parametrize("at", [1, 4])
def test_requests_survive_a_step_that_does_not_fit(model_dir, gpu, overlap, at):
    asked = {"max_new_tokens": 10, "frequency_penalty": 0.3}
    serving = serve(model_dir, gpu, graph=False, overlap=overlap)
    model, passes = serving.executor._worker._backend._parts.runner._model, []
    embed = model.embed

    def hungry(batch):
        passes.append(batch.num_tokens)
        if len(passes) == at:
            torch.empty(FAR_TOO_MUCH, dtype=torch.uint8, device=gpu.device)
        return embed(batch)

    model.embed = hungry

    assert serving.generate(PROMPTS, **asked) == Serving(model_dir).generate(PROMPTS, **asked)
    assert serving.scheduler.load().retractions > 0
    assert serving.scheduler.audit() == 0


def test_a_cache_that_does_not_fit_is_refused(model_dir, gpu):
    with pytest.raises(ConfigError, match=r"KV cache .* missing"):
        serve(model_dir, gpu, graph=False, pages=10**9)


def test_pages_go_to_the_host_and_come_back_beside_the_steps(gpu):
    shape = KVShape(num_layers=3, num_kv_heads=2, head_dim=64, num_pages=40, page_size=64)
    pool = MHAPool(shape, torch.bfloat16, gpu.device, DeviceTransfers(gpu))
    (memory,) = pool.groups
    buffer, pages = memory.host_buffer(8), np.arange(3, 11)

    def step() -> None:
        for layer in range(3):
            for side in pool.layer(layer):
                side.copy_(torch.randn_like(side))

    gpu.stream().run(step)
    with gpu.unsynced():
        sent = memory.export(pages, buffer)
        memory.copy_tokens([(3, 20, 40), (20, 21, 64)])
    sent.wait()
    again = memory.host_buffer(8)
    checked = memory.export(pages, again, checksum=True)
    got = memory.import_(pages + 20, buffer, checksums=_waited(checked).checksums)

    assert sent.error is None
    assert _waited(got).error is None
    assert bytes(again) == bytes(buffer)
    for layer in range(3):
        for side in pool.layer(layer):
            assert torch.equal(side[23:31], side[3:11])
            assert torch.equal(side[20, :40], side[3, :40])
            assert torch.equal(side[21], side[20])
    with pytest.raises(ValueError, match="not pinned"):
        memory.export(pages, np.zeros(8 * memory.page_bytes, np.uint8))


def _waited(transfer):
    transfer.wait()
    return transfer
