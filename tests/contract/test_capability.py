"""A whole capability in one file: soft prompts, as `docs/howto/add-a-capability.md` shows them.

It reads a field of the request, loads in the background while the request waits, limits how many
run beside each other, plans work, changes the forward pass, reports back, and holds memory after
the end. Scheduler, planner, worker and executor know nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from sylvan.protocol.errors import RequestError
from sylvan.protocol.requests import GenerateRequest
from sylvan.runtime.core.req import Batch, Req
from sylvan.runtime.core.step import InputEmbeds
from sylvan.runtime.executor.build import build_executor
from sylvan.runtime.executor.capability import CapabilityWorker, Report, StepContext
from sylvan.runtime.executor.options import ExecutorParts
from sylvan.runtime.features.standard_workers import STANDARD_WORKERS
from sylvan.runtime.sched.capability import Capability, SchedulerPort, Verdict
from tests.parity.serving import Serving
from tests.support.random_model import write_random_model

LOAD_POLLS, HOLD_POLLS = 3, 4


# ---- the data that crosses


class SoftRows(msgspec.Struct, frozen=True):
    """Rows [row, row + count) of the step read vectors of a soft prompt, from `start` on."""

    name: str
    row: int
    start: int
    count: int


# ---- the control half


class SoftPrompts(Capability):
    """The first tokens of a request that names a soft prompt are replaced by its vectors.

    Args:
        lengths: Vectors of each soft prompt.
        limit: Different soft prompts that may run at the same time.
    """

    name: ClassVar = "soft_prompts"
    work_type: ClassVar = tuple[SoftRows, ...]
    report_type: ClassVar = int

    def __init__(self, lengths: Mapping[str, int], limit: int = 1) -> None:
        self._lengths, self._limit = lengths, limit
        self._loading: dict[str, int] = {}
        self._held: dict[str, int] = {}
        self._port: SchedulerPort | None = None
        self.replaced = 0
        self.together: set[frozenset[str]] = set()

    def attach(self, port: SchedulerPort) -> None:
        self._port = port

    def poll(self) -> None:
        assert self._port is not None
        for name in self._loading:
            self._loading[name] += 1
        for rid in tuple(self._held):
            self._held[rid] -= 1
            if not self._held[rid]:
                del self._held[rid]
                self._port.release(rid)

    def gate(self, req: Req) -> Verdict:
        name = _name(req)
        if name is None:
            return Verdict.READY
        if name not in self._lengths:
            raise RequestError(f"there is no soft prompt {name!r}", param="custom_params")
        polls = self._loading.setdefault(name, 0)
        return Verdict.READY if polls >= LOAD_POLLS else Verdict.WAIT

    def admit(self, req: Req, admitted: Sequence[Req]) -> Verdict:
        names = {name for other in (*admitted, req) if (name := _name(other))}
        return Verdict.READY if len(names) <= self._limit or _name(req) is None else Verdict.WAIT

    def cache_namespace(self, req: Req) -> str:
        return _name(req) or ""

    def plan_work(self, batch: Batch) -> tuple[SoftRows, ...] | None:
        found: list[SoftRows] = []
        row = 0
        for piece in batch.slices:
            name = _name(piece.req)
            count = min(piece.stop, self._lengths[name]) - piece.start if name else 0
            if name and count > 0:
                found.append(SoftRows(name, row, piece.start, count))
            row += piece.stop - piece.start
        self.together.add(frozenset(n for p in batch.slices if (n := _name(p.req))))
        return tuple(found) or None

    def on_result(self, batch: Batch, report: int | None) -> None:
        self.replaced += report or 0

    def holds(self, req: Req) -> bool:
        if _name(req):
            self._held[req.rid] = HOLD_POLLS
        return req.rid in self._held


def _name(req: Req) -> str | None:
    request = req.request
    asked = request.sampling.custom_params if isinstance(request, GenerateRequest) else None
    return str(asked["soft_prompt"]) if asked and "soft_prompt" in asked else None


# ---- the worker half


class SoftPromptsWorker(CapabilityWorker):
    """Holds the vectors and puts them into the rows that the plan names."""

    name: ClassVar = SoftPrompts.name
    edits_inputs: ClassVar = True

    def __init__(self, vectors: Mapping[str, np.ndarray]) -> None:
        self._vectors = vectors

    def before_forward(self, step: StepContext, work: Sequence[SoftRows]) -> None:
        step.batch.input_embeds = tuple(
            InputEmbeds(part.row, self._vectors[part.name][part.start : part.start + part.count])
            for part in work
        )

    def after_forward(self, step: StepContext, work: Sequence[SoftRows]) -> Report:
        return lambda: sum(part.count for part in work)


# ---- what must hold

TOKENS = {"a": [200, 31, 7, 90, 12], "b": [41, 8, 8]}
TAIL = [5, 17, 99, 3, 44, 61, 2, 18, 9, 73]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return write_random_model(tmp_path_factory.mktemp("model"), context_len=128)


class Bench:
    """Serving whose soft prompts are the embeddings of known tokens: an exact oracle."""

    def __init__(self, model_dir, *, on: bool = True, **options: Any) -> None:
        self.vectors: dict[str, np.ndarray] = {}
        self.control = SoftPrompts({name: len(ids) for name, ids in TOKENS.items()})
        halves = (*STANDARD_WORKERS, lambda context: SoftPromptsWorker(self.vectors))

        def build(path, local):
            return build_executor(
                path, local, parts=ExecutorParts(halves if on else STANDARD_WORKERS)
            )

        also = (self.control,) if on else ()
        self.serving = Serving(model_dir, build=build, capabilities=also, **options)
        weight = load_file(model_dir / "model.safetensors")["model.embed_tokens.weight"]
        for name, ids in TOKENS.items():
            self.vectors[name] = weight[ids]

    def soft(self, name: str, **fields: Any) -> str:
        """A request whose first tokens mean nothing."""
        blank = [0] * len(TOKENS.get(name, [0]))
        return self.serving.add([*blank, *TAIL], custom_params={"soft_prompt": name}, **fields)


@pytest.fixture(scope="module")
def expected(model_dir):
    serving = Serving(model_dir)
    prompts = [[*ids, *TAIL] for ids in TOKENS.values()]
    return dict(zip([*TOKENS, "plain"], serving.generate([*prompts, TAIL]), strict=True))


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
@pytest.mark.parametrize("chunk", [4, 512])
def test_soft_prompts_change_the_forward_pass_of_their_requests_only(
    model_dir, expected, overlap, chunk
):
    bench = Bench(model_dir, overlap=overlap, chunk_tokens=chunk)
    rids = {bench.soft(name): name for name in ("a", "b", "a")}
    rids[bench.serving.add(TAIL)] = "plain"
    bench.serving.run()

    for rid, name in rids.items():
        assert bench.serving.tokens[rid] == expected[name]
    assert bench.control.replaced >= sum(map(len, TOKENS.values()))


@pytest.mark.parametrize("chunk", [4, 512])
def test_step_programs_take_vectors_as_well(model_dir, expected, chunk):
    bench = Bench(model_dir, runner="auto", chunk_tokens=chunk)
    rids = {bench.soft(name): name for name in ("a", "b", "a")}
    rids[bench.serving.add(TAIL)] = "plain"
    bench.serving.run()

    assert bench.serving.facts.runner.startswith("program")
    for rid, name in rids.items():
        assert bench.serving.tokens[rid] == expected[name]


def test_a_capability_that_is_on_and_unused_changes_nothing(model_dir, expected):
    prompts = [[*ids, *TAIL] for ids in TOKENS.values()]
    on = Bench(model_dir).serving.generate([*prompts, TAIL])

    assert on == list(expected.values())


def test_admission_counts_those_that_started_in_the_same_step(model_dir):
    bench = Bench(model_dir)
    for _ in range(3):
        bench.soft("a")
        bench.soft("b")
    bench.serving.run()

    assert bench.control.together <= {frozenset(), frozenset("a"), frozenset("b")}
    assert {frozenset("a"), frozenset("b")} <= bench.control.together


def test_cached_prefixes_of_soft_prompts_stay_apart(model_dir, expected):
    bench = Bench(model_dir)
    blank = bench.serving.generate([[0] * len(TOKENS["a"]) + TAIL])
    first, second = bench.soft("a"), bench.soft("a")
    bench.serving.run()

    assert bench.serving.tokens[first] == bench.serving.tokens[second] == expected["a"]
    assert bench.serving.tokens[first] != blank[0]


def test_an_unknown_soft_prompt_fails_its_request_only(model_dir, expected):
    bench = Bench(model_dir)
    bad, good = bench.soft("zzz"), bench.soft("a")
    bench.serving.run()

    finish = bench.serving.finish[bad]
    assert (finish.type, finish.param) == ("abort", "custom_params")
    assert "no soft prompt 'zzz'" in finish.message
    assert bench.serving.tokens[good] == expected["a"]


def test_memory_is_held_until_the_capability_lets_go(model_dir):
    bench = Bench(model_dir)
    rid = bench.soft("a")
    while rid not in bench.serving.finish:
        bench.serving.scheduler.step()
    held = bench.serving.scheduler.load().num_used_tokens
    for _ in range(HOLD_POLLS):
        bench.serving.scheduler.step()

    assert held > 0
    assert bench.serving.scheduler.load().num_used_tokens == 0
    assert bench.serving.scheduler.audit() == 0


# ---- a capability whose worker half works while no request runs


class Fetched(msgspec.Struct, frozen=True):
    """Requests whose memory the worker half is to fill from now on."""

    rids: tuple[str, ...]


class Fetching(Capability):
    """Each request waits in the loading phase until the worker half has fetched something."""

    name: ClassVar = "fetching"
    work_type: ClassVar = Fetched
    report_type: ClassVar = tuple[str, ...]

    def __init__(self) -> None:
        self._new: list[str] = []
        self._waiting: set[str] = set()
        self._port: SchedulerPort | None = None

    def attach(self, port: SchedulerPort) -> None:
        self._port = port

    def admit(self, req: Req, admitted: Sequence[Req]) -> Verdict:
        return Verdict.LOAD

    def on_load(self, req: Req) -> None:
        self._new.append(req.rid)
        self._waiting.add(req.rid)

    def wants_step(self) -> bool:
        return bool(self._waiting)

    def plan_work(self, batch: Batch) -> Fetched | None:
        if not self._waiting:
            return None
        new, self._new = tuple(self._new), []
        return Fetched(new)

    def on_result(self, batch: Batch, report: Sequence[str] | None) -> None:
        assert self._port is not None
        for rid in report or ():
            self._waiting.discard(rid)
            self._port.loaded(rid, 0)


class FetchingWorker(CapabilityWorker):
    """Takes three steps for each request, with slices or without."""

    name: ClassVar = Fetching.name

    def __init__(self) -> None:
        self._left: dict[str, int] = {}
        self.idle_steps = 0

    def idle_step(self, work: Fetched) -> Report:
        self.idle_steps += 1
        return self._fetch(work)

    def after_forward(self, step: StepContext, work: Fetched) -> Report:
        return self._fetch(work)

    def _fetch(self, work: Fetched) -> Report:
        self._left |= dict.fromkeys(work.rids, 3)
        self._left = {rid: left - 1 for rid, left in self._left.items()}
        ready = tuple(rid for rid, left in self._left.items() if left <= 0)
        for rid in ready:
            del self._left[rid]
        return lambda: ready


def fetching(model_dir, **options: Any) -> tuple[Serving, FetchingWorker]:
    worker = FetchingWorker()
    parts = ExecutorParts((*STANDARD_WORKERS, lambda context: worker))
    control = Fetching()
    serving = Serving(
        model_dir,
        build=lambda path, local: build_executor(path, local, parts=parts),
        capabilities=(control,),
        **options,
    )
    return serving, worker


@pytest.mark.parametrize("overlap", [False, True], ids=["in turn", "overlapped"])
def test_a_worker_half_works_in_steps_without_slices(model_dir, expected, overlap):
    serving, worker = fetching(model_dir, overlap=overlap)
    prompts = [[*ids, *TAIL] for ids in TOKENS.values()]

    assert serving.generate([*prompts, TAIL]) == list(expected.values())
    assert worker.idle_steps >= 3
    before = worker.idle_steps
    assert not serving.scheduler.step()
    assert serving.scheduler.idle
    assert worker.idle_steps == before
    serving.close()
