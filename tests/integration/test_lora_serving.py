"""Adapters through scheduler, cache and executor: the same answers in whatever company."""

from __future__ import annotations

import numpy as np
import pytest

from sylvan.protocol.adapters import decode_adapters
from sylvan.protocol.errors import RequestError
from sylvan.protocol.messages import RegisterAdapter, UnloadAdapter
from sylvan.protocol.requests import EmbedRequest
from sylvan.runtime.features.lora.copies import AdapterEntry
from sylvan.runtime.models.pooling import PoolingOverride
from tests.parity.serving import Serving
from tests.support.adapters import MEMORY, AdapterServing, write_random_adapter
from tests.support.delayed import DelayedPlatform
from tests.support.random_model import write_random_model

COUNT = 6
NAMES = [f"a{n}" for n in range(COUNT)]
NEW = 8


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def folders(model_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    ranks = [4, 1, 8, 16, 3, 4]
    return {
        name: write_random_adapter(folder / name, model_dir, seed, r=rank)
        for seed, (name, rank) in enumerate(zip(NAMES, ranks, strict=True))
    }


@pytest.fixture(scope="module")
def prompts():
    rng = np.random.default_rng(3)
    return [rng.integers(0, 256, n).tolist() for n in (70, 9, 33)]


@pytest.fixture(scope="module")
def alone(model_dir, folders, prompts):
    """By adapter: the answers to the prompts, asked one by one, each of a server of its own."""
    found = {None: Serving(model_dir, runner="auto").generate(prompts, max_new_tokens=NEW)}
    for name, folder in folders.items():
        serving = AdapterServing(model_dir, {name: folder}, runner="eager")
        rids = []
        for prompt in prompts:
            rids.append(serving.ask(prompt, name, max_new_tokens=NEW))
            serving.run()
        found[name] = [serving.tokens[rid] for rid in rids]
    assert len({str(answer) for answer in found.values()}) == COUNT + 1
    return found


def ask_all(serving, prompts) -> dict:
    return {
        (name, number): serving.ask(prompt, name, max_new_tokens=NEW)
        for number, prompt in enumerate(prompts)
        for name in (None, *NAMES)
    }


@pytest.mark.parametrize(
    ("settings", "fields"),
    [
        ({"max_per_batch": COUNT}, {}),
        ({"max_per_batch": 2, "max_loaded": 3}, {"overlap": True}),
        ({"max_per_batch": 1, "max_loaded": 1, "eviction": "fifo"}, {"chunk_tokens": 16}),
        ({"max_per_batch": 3}, {"preempt_every": 5, "pages": 40, "conservativeness": 0.1}),
    ],
    ids=["all at once", "few slots, overlapped", "one, chunked", "preempted"],
)
def test_answers_depend_neither_on_company_nor_on_slots(
    model_dir, folders, prompts, alone, settings, fields
):
    serving = AdapterServing(model_dir, folders, settings, max_running_reqs=16, **fields)

    for _ in range(2):  # the second time prefixes are cached
        rids = ask_all(serving, prompts)
        serving.run()

        for (name, number), rid in rids.items():
            assert serving.finish[rid].type != "abort", serving.finish[rid].message
            assert serving.tokens[rid] == alone[name][number]
    load = serving.lora.control.load
    assert load.copies <= settings.get("max_loaded", COUNT)
    assert load.slots_used <= load.slots_total == settings["max_per_batch"]
    assert load.loaded == COUNT
    serving.close()


def test_on_a_device_steps_with_adapters_replay_no_graph(model_dir, folders, prompts, alone):
    serving = AdapterServing(
        model_dir,
        folders,
        {"max_per_batch": 2},
        platform=DelayedPlatform(),
        options={"attention": "dense", "context_len": 128},
        max_running_reqs=2,
        max_batch_tokens=32,
    )
    assert serving.facts.runner == "graph"

    rids = {n: serving.ask(prompts[1], n, max_new_tokens=NEW) for n in (None, "a0", "a1", "a2")}
    serving.run()

    assert {name: serving.tokens[rid] for name, rid in rids.items()} == {
        name: alone[name][1] for name in rids
    }


def test_vectors_are_made_with_an_adapter_too(model_dir, folders, prompts):
    def vectors(names: list) -> dict:
        serving = AdapterServing(
            model_dir, folders, options={"embed": PoolingOverride(mode="last")}
        )
        for _ in range(2):  # the second time the prompt is cached, apart for each adapter
            for name in names:
                ids, rid = np.array(prompts[0], np.int32), f"{name}"
                request = EmbedRequest(rid=rid, input_ids=ids, lora=serving.ids[name])
                serving.scheduler.add(request)
            serving.run()
        return {name: [out.embedding for out in serving.outputs[str(name)]] for name in names}

    together = vectors([None, "a0", "a1"])

    for name, found in together.items():
        [one, cached] = found
        assert np.array_equal(one, cached)
        assert np.array_equal(one, vectors([name])[name][0])
    base, first, second = (found[0] for found in together.values())
    assert min(np.abs(base - first).max(), np.abs(first - second).max()) > 1e-3


def test_adapters_at_the_start_may_be_more_than_memory_holds(model_dir, folders, prompts, alone):
    given = {name: str(folder) for name, folder in folders.items()}
    serving = AdapterServing(
        model_dir, {}, {"adapters": given, "max_per_batch": 2, "max_loaded": 2}
    )
    found = decode_adapters(serving.lora.load(serving.executor))
    serving.ids |= {info.name: info.id for info in found}

    assert serving.lora.control.load.copies == 2
    rid = serving.ask(prompts[0], NAMES[-1], max_new_tokens=NEW)
    serving.run()
    assert serving.tokens[rid] == alone[NAMES[-1]][0]


def test_requests_without_an_adapter_take_no_slot(model_dir, folders, prompts, alone):
    serving = AdapterServing(model_dir, folders, {"max_per_batch": 1})
    rids = [serving.ask(prompts[0], name, max_new_tokens=NEW) for name in ("a0", None, "a1", None)]
    for _ in range(2):
        serving.scheduler.step()

    running = {req.rid for req in serving.scheduler.running}

    assert running == {rids[0], rids[1], rids[3]}
    serving.run()
    assert serving.tokens[rids[2]] == alone["a1"][0]


def test_an_adapter_whose_files_changed_fails_its_own_requests_only(
    model_dir, folders, prompts, alone, tmp_path
):
    serving = AdapterServing(model_dir, folders, {"max_per_batch": 1, "max_loaded": 1})
    folder = write_random_adapter(tmp_path / "new", model_dir, 99)
    serving.load("new", folder)
    rid = serving.ask(prompts[1], "a0", max_new_tokens=2)
    serving.run()  # which takes the place of the new one in host memory
    write_random_adapter(folder, model_dir, 100)

    bad = [serving.ask(prompt, "new") for prompt in prompts[:2]]
    good = serving.ask(prompts[0], "a1", max_new_tokens=NEW)
    serving.run()

    assert serving.finish[rid].type == "length"
    for rid in bad:
        assert serving.finish[rid].status == 400
        assert "are not those that were loaded" in serving.finish[rid].message
    assert serving.tokens[good] == alone["a1"][0]
    write_random_adapter(folder, model_dir, 99)
    again = serving.ask(prompts[0], "new")
    serving.run()
    assert serving.finish[again].type == "length"


@pytest.mark.parametrize("abort", [False, True])
def test_unloading_lets_requests_finish_or_ends_them(model_dir, folders, prompts, alone, abort):
    serving = AdapterServing(model_dir, folders, {"max_per_batch": 2})
    live = [serving.ask(prompt, "a0", max_new_tokens=NEW) for prompt in prompts]
    other = serving.ask(prompts[0], "a1", max_new_tokens=NEW)
    for _ in range(3):
        serving.scheduler.step()

    body = serving.lora.execute(UnloadAdapter(id=serving.ids["a0"], abort=abort), serving.scheduler)
    late = serving.ask(prompts[0], "a0")
    serving.run()

    assert body == {"num_requests": 3}
    for number, rid in enumerate(live):
        if abort:
            assert serving.finish[rid].status == 503
            assert "unloaded" in serving.finish[rid].message
        else:
            assert serving.tokens[rid] == alone["a0"][number]
    assert serving.finish[late].status == 400
    assert "'a0' was unloaded" in serving.finish[late].message
    assert serving.tokens[other] == alone["a1"][0]
    assert serving.lora.control.load.loaded == COUNT - 1
    assert serving.lora.control.load.copies == COUNT - 1


def test_a_name_that_gets_other_contents_shares_no_keys_and_values(
    model_dir, folders, prompts, alone
):
    serving = AdapterServing(model_dir, {"name": folders["a0"]})
    first = serving.ask(prompts[0], "name", max_new_tokens=NEW)
    serving.run()
    serving.lora.execute(UnloadAdapter(id=serving.ids["name"]), serving.scheduler)
    serving.load("name", folders["a1"])

    second = serving.ask(prompts[0], "name", max_new_tokens=NEW)
    third = serving.ask(prompts[0], "name", max_new_tokens=NEW)
    serving.run()

    assert serving.tokens[first] == alone["a0"][0]
    assert serving.tokens[second] == serving.tokens[third] == alone["a1"][0]
    assert serving.outputs[second][0].usage.cached_tokens == 0
    assert serving.outputs[third][0].usage.cached_tokens > 0


def test_pinned_adapters_keep_their_places(model_dir, folders, prompts):
    serving = AdapterServing(model_dir, {}, {"max_per_batch": 2, "max_loaded": 2})
    pinned = serving.load("a0", folders["a0"], pinned=True)
    for name in NAMES[1:]:
        serving.load(name, folders[name])
    for name in NAMES:
        serving.ask(prompts[1], name, max_new_tokens=2)
    serving.run()

    with pytest.raises(RequestError, match="at most 1 can be"):
        serving.lora.control.add(AdapterEntry("x@1", "/x", 1, pinned=True), resident=False)
    assert serving.lora.control.is_resident(pinned)
    assert serving.lora.control.load.copies == 2


def test_one_that_is_pinned_while_others_run_waits_for_a_place(model_dir, folders, prompts, alone):
    serving = AdapterServing(model_dir, folders, {"max_per_batch": 2})
    first = [serving.ask(prompts[0], name, max_new_tokens=NEW) for name in ("a0", "a1")]
    serving.scheduler.step()
    serving.load("a2", folders["a2"], pinned=True)
    rest = [serving.ask(prompts[0], name, max_new_tokens=NEW) for name in ("a2", "a3", "a0")]
    serving.run()

    names = ("a0", "a1", "a2", "a3", "a0")
    for name, rid in zip(names, first + rest, strict=True):
        assert serving.tokens[rid] == alone[name][0]


def test_an_adapter_that_was_registered_is_read_when_it_is_asked_for(
    model_dir, folders, prompts, alone
):
    """As after a restart, when nothing is in memory."""
    before = AdapterServing(model_dir, {"a2": folders["a2"]})
    serving = AdapterServing(model_dir, {})
    serving.ids["a2"] = before.ids["a2"]
    serving.lora.execute(
        RegisterAdapter(id=before.ids["a2"], path=str(folders["a2"]), num_bytes=1),
        serving.scheduler,
    )

    rids = [serving.ask(prompt, "a2", max_new_tokens=NEW) for prompt in prompts]
    unknown = serving.add(prompts[0], lora="x@1")
    serving.run()

    assert [serving.tokens[rid] for rid in rids] == alone["a2"]
    assert serving.finish[unknown].status == 400


def test_an_adapter_that_memory_never_holds_fails_its_own_requests_only(
    model_dir, folders, prompts, alone
):
    """As after a restart with less memory than it was loaded with."""
    serving = AdapterServing(model_dir, {"a2": folders["a2"]})
    serving.lora.execute(
        RegisterAdapter(id="large@1", path=str(folders["a1"]), num_bytes=MEMORY + 1),
        serving.scheduler,
    )

    refused = [serving.add(prompts[0], lora="large@1") for _ in range(2)]
    rids = [serving.ask(prompt, "a2", max_new_tokens=NEW) for prompt in prompts]
    serving.run()

    assert [serving.finish[rid].status for rid in refused] == [400, 400]
    assert "no room in host memory" in serving.finish[refused[0]].message
    assert [serving.tokens[rid] for rid in rids] == alone["a2"]
