"""EAGLE heads: they draft what their definition says, and answers are those without them."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from sylvan.kernels.native.library import describe
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.core.wire import StepCodec
from sylvan.runtime.executor.build import build_executor
from sylvan.runtime.executor.options import ExecutorParts
from sylvan.runtime.features.speculation.api import Proposal, depth_of
from sylvan.runtime.features.speculation.depth import LONGEST_PAUSE
from sylvan.runtime.features.speculation.head_control import HeadSpeculation
from sylvan.runtime.features.speculation.head_work import CHAIN, HeadReport, HeadWork, TreeShape
from sylvan.runtime.features.speculation.heads import head_worker
from sylvan.runtime.features.standard_workers import STANDARD_WORKERS
from tests.contract.test_drafts_by_model import PROMPTS, WAYS, Ticks
from tests.parity.serving import Serving
from tests.support.draft_heads import expected_draft, tree, write_head
from tests.support.random_model import HIDDEN, VOCAB, write_random_model
from tests.support.serving_store import ServingStore

pytestmark = pytest.mark.skipif(describe().variant is None, reason="kernels are not compiled")

HEADS = {
    "eagle": {"kind": "eagle"},
    "eagle, its own layer names": {"kind": "eagle", "prefix": "layers.0."},
    "eagle3": {"kind": "eagle3"},
    "eagle3, few words": {"kind": "eagle3", "drafted": 100},
    "eagle3, the model's embedding": {"kind": "eagle3", "embedding": False, "drafted": 100},
}


class Told(HeadSpeculation):
    """Notes what was drafted after which tokens."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.said: list[tuple[list[int], list[int]]] = []
        self.trees: list[Proposal] = []

    def may_draft(self):
        brought = list(self._new_proposals)
        found = super().may_draft()
        for req in brought:
            proposal, known = self._proposals[req]
            self.said.append((req.tokens.view(0, known).tolist(), list(proposal.tokens)))
            self.trees.append(proposal)
        return found


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("model"), context_len=128)


@pytest.fixture(scope="module")
def expected(model_dir):
    serving = Serving(model_dir, runner="program")
    return {way: serving.generate(PROMPTS, max_new_tokens=24, **ask) for way, ask in WAYS.items()}


def build_with(head_dir, kind, limit, shape):
    def build(path, options):
        workers = (*STANDARD_WORKERS, head_worker(head_dir, kind, limit, shape))
        return build_executor(path, options, parts=ExecutorParts(workers))

    return build


def speculating(
    model_dir, head_dir, kind, *, adaptive=False, limit=4, clock=None, shape=CHAIN, **options
):
    speculation = Told(limit, VOCAB, adaptive=adaptive, clock=clock or Ticks(), shape=shape)
    if shape.width > 1:
        paths = {"tree_paths": 8 * shape.nodes, "tree_depth": limit, "max_samples": 120}
        options["options"] = paths | options.get("options", {})
    serving = Serving(
        model_dir,
        runner=options.pop("runner", "program"),
        capabilities=(speculation,),
        build=build_with(head_dir, kind, limit, shape),
        **options,
    )
    return serving, speculation


@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_it_drafts_what_its_definition_says(model_dir, expected, tmp_path, name):
    head = write_head(tmp_path / "head", **HEADS[name])
    serving, speculation = speculating(model_dir, head, HEADS[name]["kind"], page_size=16)
    found = serving.generate(PROMPTS, max_new_tokens=24)

    assert found == expected["greedy"]
    assert len(speculation.said) > 60
    for known, said in speculation.said[::5]:
        assert said == expected_draft(model_dir, head, known, 4)[: len(said)]
    assert speculation.counts.failures == 0


def paths_of(proposal):
    paths = []
    for token, parent in zip(proposal.tokens, proposal.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return set(paths)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle", "eagle3, few words"])
def test_trees_are_those_of_the_likeliest_drafts(model_dir, expected, tmp_path, name):
    head = write_head(tmp_path / "head", **HEADS[name])
    shape = TreeShape(3, 8)
    serving, speculation = speculating(model_dir, head, HEADS[name]["kind"], shape=shape)
    assert serving.generate(PROMPTS, max_new_tokens=24) == expected["greedy"]

    assert speculation.counts.failures == 0
    whole = [
        (known, proposal)
        for (known, _), proposal in zip(speculation.said, speculation.trees, strict=True)
        if len(known) < min(map(len, PROMPTS)) + 18  # there is room for all of a tree
    ]
    assert len(whole) > 15
    assert max(depth_of(proposal) for _, proposal in whole) > 1
    for known, proposal in whole[::8]:
        assert paths_of(proposal) == tree(model_dir, head, known, 4, *shape)


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("adaptive", [False, True])
def test_tokens_are_those_without_trees(model_dir, expected, tmp_path, way, adaptive):
    head = write_head(tmp_path / "head", "eagle3", drafted=60)
    serving, speculation = speculating(
        model_dir,
        head,
        "eagle3",
        adaptive=adaptive,
        shape=TreeShape(2, 6),
        pages=14,
        chunk_tokens=8,
        preempt_every=7,
    )
    for _ in range(2):
        found = serving.generate(PROMPTS, max_new_tokens=24, **WAYS[way])
        assert found == expected[way]
    assert speculation.counts.failures == 0
    assert serving.scheduler.audit() == 0
    if not adaptive:
        assert serving.scheduler.load().verified_drafts > 10


@pytest.mark.parametrize("runner", ["program", "auto", "eager"])
def test_the_runner_makes_no_difference(model_dir, tmp_path, runner):
    head = write_head(tmp_path / "head", "eagle3")
    serving, speculation = speculating(model_dir, head, "eagle3", runner=runner)
    serving.generate(PROMPTS[:1], max_new_tokens=8)

    assert len(speculation.said) > 5
    for known, said in speculation.said:
        assert said == expected_draft(model_dir, head, known, 4)[: len(said)]


def test_chunks_and_cached_prefixes_are_read_as_whole_prompts_are(model_dir, expected, tmp_path):
    head = write_head(tmp_path / "head", "eagle3", drafted=90)
    serving, speculation = speculating(
        model_dir, head, "eagle3", chunk_tokens=5, max_batch_tokens=24
    )
    prompt = list(range(30, 70))
    first = serving.generate([prompt], max_new_tokens=20)
    assert serving.generate([[*prompt, *first[0][:8]], [*prompt, 9]], max_new_tokens=10)

    assert serving.scheduler.load().cached_prompt_tokens >= 2 * 32
    for known, said in speculation.said[::2]:
        assert said == expected_draft(model_dir, head, known, 4)[: len(said)]


def test_what_the_head_made_of_a_prefix_is_stored_with_it(model_dir, expected, tmp_path):
    head = write_head(tmp_path / "head", "eagle3")
    prompt = list(range(30, 78))  # three pages
    said = []
    for _ in range(2):  # the second server finds the prefix in the store
        speculation = Told(4, VOCAB, adaptive=False, clock=Ticks())
        serving = Serving(
            model_dir,
            runner="program",
            capabilities=(speculation,),
            workers=(head_worker(head, "eagle3", 4),),
            store=ServingStore(tmp_path / "store"),
        )
        serving.generate([[*prompt, 9]], max_new_tokens=8)
        said.append(speculation.said)
        load = serving.scheduler.load()
        serving.close()

    assert load.cached_prompt_tokens == len(prompt)
    assert said[0] == said[1]
    for known, tokens in said[1]:
        assert tokens == expected_draft(model_dir, head, known, 4)[: len(tokens)]


def test_right_drafts_are_accepted(tmp_path):
    """A model whose next token follows from the newest, and a head that knows how."""
    model_dir = write_random_model(tmp_path / "model", context_len=128)
    file = model_dir / "model.safetensors"
    weights = load_file(file)
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weights[name] = np.zeros_like(weights[name])
    save_file(weights, file, metadata={"format": "pt"})
    zero = np.zeros((HIDDEN, HIDDEN), np.float32)
    changes = {
        "fc.weight": np.concatenate([np.eye(HIDDEN, dtype=np.float32), zero], 1),
        "fc.bias": np.zeros(HIDDEN, np.float32),
        "midlayer.self_attn.o_proj.weight": zero,
        "midlayer.mlp.down_proj.weight": np.zeros((HIDDEN, 112), np.float32),
    }
    head = write_head(tmp_path / "head", "eagle", embedding=False, changes=changes)
    plain = Serving(model_dir, runner="program").generate(PROMPTS, max_new_tokens=40)
    serving, _ = speculating(model_dir, head, "eagle", limit=5)

    assert serving.generate(PROMPTS, max_new_tokens=40) == plain
    load = serving.scheduler.load()
    assert load.accept_rate == 1.0
    assert load.accept_length > 4
    assert load.steps < 15

    for way in ("sampled", "penalised"):
        wanted = Serving(model_dir, runner="program").generate(
            PROMPTS, max_new_tokens=24, **WAYS[way]
        )
        assert serving.generate(PROMPTS, max_new_tokens=24, **WAYS[way]) == wanted


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("adaptive", [False, True])
def test_tokens_are_those_without(model_dir, expected, tmp_path, way, adaptive):
    head = write_head(tmp_path / "head", "eagle3", drafted=60)
    serving, speculation = speculating(
        model_dir, head, "eagle3", adaptive=adaptive, pages=14, chunk_tokens=8, preempt_every=7
    )
    for _ in range(2):
        found = serving.generate(PROMPTS, max_new_tokens=24, **WAYS[way])
        assert found == expected[way]

    assert speculation.counts.failures == 0
    assert serving.scheduler.audit() == 0
    assert not speculation._depth.followed
    assert not speculation._proposals


def test_a_head_that_is_never_right_is_asked_ever_less(model_dir, tmp_path):
    head = write_head(tmp_path / "head", "eagle3")
    serving, speculation = speculating(
        model_dir, head, "eagle3", adaptive=True, clock=lambda: next(ticks)
    )
    ticks = iter(np.arange(0, 1e6).tolist())  # whatever takes time takes a second
    serving.generate(PROMPTS[:1], max_new_tokens=100)

    assert 2 < speculation.counts.looks < 30
    assert 8 < speculation._pauses._pause <= LONGEST_PAUSE
    for known, said in speculation.said:  # what it had put off is read before
        assert said == expected_draft(model_dir, head, known, len(said))


def test_what_was_put_off_is_read_in_parts_that_fit(model_dir, tmp_path):
    head = write_head(tmp_path / "head", "eagle3")
    serving, speculation = speculating(
        model_dir, head, "eagle3", adaptive=True, max_batch_tokens=16, max_running_reqs=4
    )
    asked = [[n, n + 1, n + 2] for n in range(4)]
    plain = Serving(model_dir, runner="program").generate(asked, max_new_tokens=100)

    assert serving.generate(asked, max_new_tokens=100) == plain
    assert speculation.counts.failures == 0
    for known, said in speculation.said:
        assert said == expected_draft(model_dir, head, known, len(said))


def test_what_the_halves_tell_each_other_may_cross_processes(model_dir, expected, tmp_path):
    head = write_head(tmp_path / "head", "eagle3", drafted=90)
    serving, speculation = speculating(model_dir, head, "eagle3", chunk_tokens=6)
    codec = StepCodec({"speculation": HeadWork}, {"speculation": HeadReport})
    launch = serving.executor.launch

    class Crossed:
        def __init__(self, pending) -> None:
            self._pending = pending

        def wait(self):
            return codec.result(codec.encode(self._pending.wait()))

    def crossing(plan):
        assert "speculation" in plan.work or not plan.num_slices
        return Crossed(launch(codec.plan(codec.encode(plan))))

    serving.executor.launch = crossing
    assert serving.generate(PROMPTS, max_new_tokens=24) == expected["greedy"]
    assert len(speculation.said) > 60


@pytest.mark.slow
def test_drafts_reach_beyond_the_longest_text(model_dir, tmp_path):
    head = write_head(tmp_path / "head", "eagle3")
    serving, speculation = speculating(model_dir, head, "eagle3", limit=20)
    serving.generate([list(range(30, 110))], max_new_tokens=48)

    assert speculation.counts.failures == 0
    known, said = speculation.said[-1]
    assert said == expected_draft(model_dir, head, known, 20)[: len(said)]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"kind": "eagle"}, "holds a head for eagle; use eagle"),
        ({"vocab_size": 99, "drafted": 99}, "a vocabulary of 99 tokens, the model has 264"),
        ({"target_hidden_size": 128}, "vectors of 128 columns, those of the model have 64"),
        ({"changes": {"fc.weight": None}}, "no tensor 'fc.weight', so it is not an EAGLE head"),
        ({"changes": {"norm.weight": None}}, "tensor 'norm.weight' is missing"),
        ({"changes": {"norm.weight": np.ones(3, np.float32)}}, "'norm.weight' has shape [3]"),
        ({"changes": {"fc.weight": np.ones((64, 64), np.float32)}}, "'fc.weight' has shape"),
        ({"drafted": 50, "changes": {"d2t": None}}, "the map of their ids (tensor 'd2t')"),
        ({"drafted": 50, "changes": {"d2t": np.arange(50) + 999}}, "ids that are not in 0..263"),
        ({"drafted": 50, "changes": {"d2t": np.arange(9)}}, "'d2t' has shape [9]"),
        ({"changes": {"layers.1.norm.weight": np.ones(3, np.float32)}}, "more than one layer"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [7, 0, 1]}}, "reads layers [7, 0, "),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "all"}}, "must be a list of layers"),
    ],
)
def test_heads_that_do_not_fit_are_refused_by_name(model_dir, tmp_path, wrong, words):
    head = write_head(tmp_path / "head", **{"kind": "eagle3"} | wrong)

    with pytest.raises(ConfigError) as refused:
        speculating(model_dir, head, "eagle3")
    assert words in str(refused.value)
    assert "speculative." in str(refused.value)
