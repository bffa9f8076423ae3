"""Resolves `auto` values, each with a reason. Pure; values that were given never change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from sylvan.config.determinism import determinism_blocker, same_bits_blockers
from sylvan.config.facts import (
    DTYPE_BYTES,
    KEEPS_CODES,
    AttentionFacts,
    CheckpointInfo,
    DeviceFacts,
    Facts,
)
from sylvan.config.fields import get, replaced, size_text
from sylvan.config.parallel import GPUS
from sylvan.config.plan import (
    CPU_SHARE,
    GPU_SHARE,
    GroupBytes,
    MemoryPlan,
    PlannedLoad,
    fitting_tokens,
    group_bytes,
    state_bytes,
    useful_tokens,
    weight_bytes,
    work_bytes,
)
from sylvan.config.tree import (
    DRAFT_HEADS,
    OWN_HEAD,
    Config,
)

CACHE_POLICIES = frozenset({"lpm", "dfs_weight"})
"""Policies that order by cached prefixes."""
SMALL_MODEL_PARAMS = 200_000_000
MAX_RUNNING_REQS = 256
NGRAM_GUESSES = 10
MODEL_GUESSES = 4
HEAD_GUESSES = 4
USUAL_RANK = 64
"""Default maximum rank; few adapters have more."""
ADAPTER_SHARE = 0.1
"""Share of the host's memory for adapters."""
STATE_SHARE = 1 / 3
"""Share of the memory besides weights for recurrent states."""
MIN_STATES = 3


@dataclass(frozen=True, slots=True)
class Decision:
    """The value chosen for an `auto` at a path, and the reason."""

    path: str
    value: object
    reason: str


@dataclass(frozen=True, slots=True)
class Resolved:
    """A tree without `auto`, as far as known before the model is loaded.

    Attributes:
        given: The tree before resolving.
        config: The tree after resolving.
        decisions: Decisions by path.
        plan: Memory plan of the device; the KV cache has `plan.num_pages`.
    """

    given: Config
    config: Config
    decisions: Mapping[str, Decision]
    plan: MemoryPlan


def resolve(config: Config, facts: Facts) -> Resolved:
    """Resolve every `auto`; `sylvan.config.check` checks the result."""
    state = _State(config, facts)
    for step in _STEPS:
        step(state)
    plan = _plan(state)
    _decide_memory(state, plan)
    return Resolved(config, state.config, state.decisions, plan)


@dataclass(slots=True)
class _State:
    config: Config
    facts: Facts
    decisions: dict[str, Decision] = field(default_factory=dict[str, Decision])

    @property
    def device(self) -> DeviceFacts:
        """The chosen device; an empty one if it does not exist, which `check` reports."""
        return self.facts.devices.get(self.config.device, DeviceFacts(kind=self.config.device))

    @property
    def all_devices(self) -> DeviceFacts:
        """The memory of all ranks together, where each has a device of its own."""
        device, ranks = self.device, self.config.parallel.ranks
        if device.kind == "cpu" or ranks == 1:
            return device
        return replace(
            device,
            total_bytes=device.total_bytes * ranks,
            available_bytes=device.available_bytes * ranks,
        )

    @property
    def attention(self) -> AttentionFacts:
        """The chosen backend; one without limits if the name is unknown, which `check` reports."""
        unknown = AttentionFacts(devices=frozenset({self.config.device}))
        return self.facts.attention.get(self.config.attention, unknown)

    def is_auto(self, path: str) -> bool:
        return get(self.config, path) == "auto"

    def decide(self, path: str, value: object, reason: str) -> None:
        """Set `path` if it is `auto`."""
        if self.is_auto(path):
            self.config = replaced(self.config, {path: value})
            self.decisions[path] = Decision(path, value, reason)


def _task(state: _State) -> None:
    names = {"generate": "continues texts", "embed": "turns texts into vectors"}
    task = state.facts.model.tasks[0]
    if state.config.task == "vectors":
        task = "embed" if "embed" in state.facts.model.tasks else task
        state.config = replaced(state.config, {"task": "auto"})
    state.decide("task", task, f"the model {names.get(task, 'classifies texts')}")


def _device(state: _State) -> None:
    kind = next((name for name in state.facts.devices if name != "cpu"), "cpu")
    state.decide("device", kind, "there is no GPU" if kind == "cpu" else "there is a GPU")
    groups = state.config.parallel.attention_groups
    state.decide("parallel.attention_dp", groups, "each rank or device is a group")
    ranks = state.config.parallel.ranks
    why = "all cores available to this process"
    if ranks > 1:
        why = f"a rank's share of the cores, with {ranks} ranks"
    here = max(1, ranks // state.config.parallel.nodes)
    state.decide("threads", max(1, state.device.cores // here), why)
    if state.config.device in GPUS:
        state.decide("parallel.backend", *_backend_of_gpus(state.config))
        return
    compiled = "program" in state.device.runners
    why = "faster than gloo" if compiled else "no kernels are compiled"
    if state.config.parallel.nodes > 1:
        compiled, why = False, "machines share no memory"
    state.decide("parallel.backend", "shared" if compiled else "gloo", why)


def _backend_of_gpus(config: Config) -> tuple[str, str]:
    if config.parallel.nodes > 1:
        return "nccl", "machines share no memory"
    return "shared", "short messages are faster in memory that all GPUs see"


def _dtype(state: _State) -> None:
    stored, device = state.facts.model.dtype, state.device
    if stored in device.fast_dtypes or device.kind != "cpu":
        state.decide("dtype", stored, "the checkpoint's")
    elif state.facts.model.quantization is not None and "bfloat16" in device.fast_dtypes:
        why = f"the matrices are quantised, and {stored} is slow on this {device.kind}"
        state.decide("dtype", "bfloat16", why)
    else:
        why = f"the checkpoint's {stored} is slow on this {device.kind}"
        state.decide("dtype", "float32", why)


def _deterministic(state: _State) -> None:
    found = determinism_blocker(state.config, state.facts)
    why = found.cause if found else "native steps guarantee it; models without them are logged"
    state.decide("deterministic", found is None, why)


def _same_bits(state: _State) -> None:
    """With several ranks, leave the decision to the model builder, which knows the dimensions."""
    for what, why in same_bits_blockers(state.config, state.facts).items():
        state.decide("parallel.same_bits", False, f"{what.strip('{}')}: {why}")
    if state.config.parallel.tp == 1:
        state.decide("parallel.same_bits", True, "sums depend on the number of ranks")
    elif state.is_auto("parallel.same_bits"):
        why = "if the model's dimensions divide equally for any number of ranks"
        state.decide("parallel.same_bits", "auto", why)


def _fallback(state: _State) -> None:
    config = state.config
    chosen = [name for name in ("runner", "attention") if get(config, name) != "auto"]
    if config.deterministic is True:
        chosen.append("deterministic")
    if config.parallel.same_bits is True:
        chosen.append("parallel.same_bits")
    why = f"{chosen[0]} was chosen" if chosen else "any model can fall back to PyTorch"
    state.decide("runner_fallback", not chosen, why)


def _attention(state: _State) -> None:
    """Prefer a batch-invariant backend, unless the user declined it or none is available."""
    known = state.facts.attention
    fitting = [
        name
        for name in state.device.attention or known
        if name in known and _fits(state, known[name])
    ]
    wanted = state.config.deterministic is not False
    exact = [name for name in fitting if wanted and _keeps_bits(state, known[name])]
    if found := exact or fitting:
        why = f"the fastest on {state.config.device} with the other settings"
        state.decide("attention", found[0], why)


def _keeps_bits(state: _State, attention: AttentionFacts) -> bool:
    runner = state.config.runner
    runners = attention.runners if runner == "auto" else attention.runners & {runner}
    return attention.batch_invariant and bool(runners & state.device.exact_runners)


def _fits(state: _State, attention: AttentionFacts) -> bool:
    config = state.config
    wanted = (
        config.device in attention.devices,
        config.cache.dtype in attention.kv_dtypes,
        attention.dtypes is None or config.dtype in attention.dtypes,
        attention.max_head_dim is None or state.facts.model.head_dim <= attention.max_head_dim,
        config.runner == "auto" or config.runner in attention.runners,
        config.cache.page_size == "auto"
        or attention.page_sizes is None
        or config.cache.page_size in attention.page_sizes,
    )
    return all(wanted)


def _runner(state: _State) -> None:
    found = [runner for runner in state.device.runners if runner in state.attention.runners]
    wanted = state.config.deterministic is not False and state.attention.batch_invariant
    exact = [runner for runner in found if wanted and runner in state.device.exact_runners]
    if found:
        runner = (exact or found)[0]
        state.decide("runner", runner, _RUNNERS[runner])


_RUNNERS = {
    "program": "replays each step in one native call",
    "graph": "replays decoding steps in one launch",
    "eager": "runs everywhere",
}


def _names(state: _State) -> None:
    stored = state.facts.model.weights
    if stored != "pt":  # must be requested by name
        why = "the model's format" if stored else "the default"
        state.decide("load_format", stored or "safetensors", why)
    cached = state.config.cache.prefix != "none"
    why = "longest cached prefix first" if cached else "no prefixes are cached"
    state.decide("scheduler.policy", "lpm" if cached else "fcfs", why)
    backends = state.facts.options.get("grammar.backend", ())
    order = {
        "combined": "llguidance, and xgrammar for what it does not support",
        "llguidance": "installed",
        "xgrammar": "installed",
    }
    chosen = next((name for name in order if name in backends), "none")
    why = order.get(chosen, "no grammar library is installed")
    state.decide("grammar.backend", chosen, why)


def _pages(state: _State) -> None:
    size = state.attention.page_size
    state.decide("cache.page_size", size, f"suits {state.config.attention} attention")


def _load_cache(state: _State) -> None:
    reasons = {
        f"weights are packed for CPUs, not for {state.config.device}": state.config.device != "cpu",
        "the weights are random": state.config.load_format == "dummy",
        "weights are packed for step programs only": state.config.runner != "program",
        "the user's cache directory cannot be used": state.facts.load_cache is None,
    }
    why = next((why for why, holds in reasons.items() if holds), "")
    folder = None if why else state.facts.load_cache
    state.decide("load_cache", folder, why or "later starts read what this one writes there")


def _recurrent(state: _State) -> None:
    """Slots for running requests and as many cached prefixes, within a share of the memory."""
    model, device = state.facts.model, state.all_devices
    if not model.state_numbers:
        state.decide("cache.max_states", 1, "all layers attend")
        return
    running = state.config.scheduler.max_running_reqs
    wanted = 2 * (MAX_RUNNING_REQS if running == "auto" else running) + 1
    share = CPU_SHARE if device.kind == "cpu" else GPU_SHARE
    weights = _weight_bytes(state, model)
    room = int((share * device.available_bytes - weights) * STATE_SHARE) // state_bytes(model)
    count = max(MIN_STATES, min(wanted, room))
    why = "running requests, and as many prefixes" if count == wanted else "a third of the memory"
    state.decide("cache.max_states", count, why)


def _batch(state: _State) -> None:
    scheduler, model = state.config.scheduler, state.facts.model
    tokens, why = _step_tokens(state)
    whole = scheduler.chunk_tokens == 0 or not model.causal
    if whole and tokens < model.context_len:
        tokens, why = model.context_len, "prompts are not split, so the longest one must fit"
    elif isinstance(scheduler.chunk_tokens, int) and scheduler.chunk_tokens > tokens:
        chunk = min(scheduler.chunk_tokens, max(tokens, model.context_len))
        tokens, why = chunk, "a prompt chunk must fit"
    state.decide("scheduler.max_batch_tokens", tokens, why)
    most = _number(state.config.scheduler.max_batch_tokens)
    running = min(MAX_RUNNING_REQS, most)
    limited = running < MAX_RUNNING_REQS
    why = "each needs a token per step" if limited else "more requests gain nothing on one device"
    states = _number(state.config.cache.max_states) - 1
    if model.state_numbers and states < running:
        running, why = max(1, states), "each needs a recurrent state slot"
    state.decide("scheduler.max_running_reqs", running, why)
    state.decide("scheduler.chunk_tokens", most, "a whole step, less decoding requests")


def _step_tokens(state: _State) -> tuple[int, str]:
    gib = state.device.total_bytes / (1 << 30)
    if state.config.device == "cpu":
        small = state.facts.model.num_params < SMALL_MODEL_PARAMS
        return (2048, "a small model") if small else (512, "keeps steps on a CPU short")
    for limit, tokens in ((20, 2048), (60, 4096), (160, 8192)):
        if gib < limit:
            return tokens, f"a GPU with less than {limit} GiB"
    return 16384, "a GPU with plenty of memory"


def _speculative(state: _State) -> None:
    given = state.config.speculative
    if given is None:
        return
    state.decide("speculative.topk", 1, "one draft token per position")
    wide = get(state.config, "speculative.topk") != 1
    if isinstance(given.num_draft_tokens, int) and not wide:
        steps, why = (
            max(1, given.num_draft_tokens - 1),
            "one less than speculative.num_draft_tokens",
        )
    else:
        steps, why = NGRAM_GUESSES, "a typical length of copied text"
        if given.algorithm in (*DRAFT_HEADS, OWN_HEAD):
            steps, why = HEAD_GUESSES, "each draft token takes a pass of the head"
        elif given.algorithm == "standalone":
            steps, why = MODEL_GUESSES, "each draft token takes a pass of the draft model"
    state.decide("speculative.num_steps", steps, why)
    steps = _number(get(state.config, "speculative.num_steps"))
    tokens, why = steps + 1, "the draft tokens and the token before them"
    if wide:
        tokens, why = 2 * steps + 1, "two draft tokens per position"
    state.decide("speculative.num_draft_tokens", tokens, why)


def _lora(state: _State) -> None:
    if state.config.lora is None:
        return
    rank, why = USUAL_RANK, "few adapters have a larger rank"
    if state.facts.adapter_rank > rank:
        rank, why = state.facts.adapter_rank, "the largest of lora.adapters"
    state.decide("lora.max_rank", rank, why)
    host = state.facts.devices.get("cpu", state.device)
    size = max(1 << 20, int(ADAPTER_SHARE * host.available_bytes))
    state.decide("lora.memory", size, "a tenth of the host's free memory")


def _overlap(state: _State) -> None:
    if state.config.speculative is not None:
        state.decide("scheduler.overlap", "off", "drafting needs the newest token")
    if state.config.device != "cpu":
        state.decide("scheduler.overlap", "on", "the GPU computes while the CPU plans")
    elif state.config.parallel.ranks > 1:
        state.decide("scheduler.overlap", "off", "ranks leave no core free for planning")
    elif state.config.runner == "program" and _number(state.config.threads) < state.device.cores:
        state.decide("scheduler.overlap", "on", "the native step leaves a core free for planning")
    else:
        state.decide("scheduler.overlap", "off", "planning would take cores from the step")


def _weight_bytes(state: _State, model: CheckpointInfo) -> int:
    config = state.config
    kept = model.quantization if config.device in KEEPS_CODES else None  # else expanded
    stored = config.quantization or kept
    return weight_bytes(model, str(config.dtype), stored, config.device)


def _plan(state: _State) -> MemoryPlan:
    config, model = state.config, state.facts.model
    weights = _weight_bytes(state, model)
    running = _number(config.scheduler.max_running_reqs)
    samples = config.speculative.max_sampled_rows(running) if config.speculative else running
    work = work_bytes(model, _number(config.scheduler.max_batch_tokens), samples)
    branches = 0  # recurrent states between draft tokens
    if config.speculative:
        branches = samples - 1 + config.speculative.max_paths(running)
    work += (_number(config.cache.max_states) + branches) * state_bytes(model)
    if config.lora is not None and config.device == "cpu":
        work += _number(config.lora.memory)
    draft = state.facts.draft
    if draft is not None:
        weights += weight_bytes(draft, str(config.dtype), None)
        work += work_bytes(draft, _number(config.scheduler.max_batch_tokens), running)
    page = _number(config.cache.page_size)
    number = DTYPE_BYTES[str(config.dtype)] if config.cache.dtype == "model" else 1
    per_token = model.kv_per_token * number
    if config.cache.dtype == "int4":
        per_token //= 2
    scaled = ("int8", "int4", *(("fp8_e4m3", "fp8_e5m2") if config.device == "cpu" else ()))
    if config.cache.dtype in scaled:  # a scale of 4 bytes for each head
        per_token += 4 * model.kv_per_token // max(1, model.head_dim)
    if draft is not None:  # it stores as many tokens
        per_token += draft.kv_per_token * number
    load = PlannedLoad(
        running_reqs=running,
        step_tokens=_number(config.scheduler.max_batch_tokens),
        page_size=page,
    )
    entries = per_token * model.kv_entries // max(1, model.kv_per_token)
    groups = group_bytes(per_token, model.layer_windows, entries)
    budget, tokens = _kv_tokens(state, weights, work, groups, load)
    if config.cache.max_tokens != "auto":
        tokens = -(-_number(config.cache.max_tokens) // page) * page
    return MemoryPlan(
        budget_bytes=budget,
        weight_bytes=weights,
        work_bytes=work,
        groups=groups,
        load=load,
        num_tokens=tokens,
    )


def _kv_tokens(
    state: _State, weights: int, work: int, groups: tuple[GroupBytes, ...], load: PlannedLoad
) -> tuple[int, int]:
    """Total memory budget in bytes, and tokens of the KV cache set by `cache.memory`."""
    device, memory = state.all_devices, state.config.cache.memory
    if isinstance(memory, float):
        room = int(memory * device.total_bytes - weights)
        return device.available_bytes, fitting_tokens(groups, room, load)
    if isinstance(memory, int):
        return device.available_bytes, fitting_tokens(groups, memory, load)
    share = CPU_SHARE if device.kind == "cpu" else GPU_SHARE
    budget = int(share * device.available_bytes)
    fitting = fitting_tokens(groups, budget - weights - work, load)
    return budget, min(fitting, _useful_tokens(state))


def _useful_tokens(state: _State) -> int:
    longest = state.config.context_len
    length = state.facts.model.context_len if longest == "auto" else longest
    running = _number(state.config.scheduler.max_running_reqs)
    return useful_tokens(length, running, _number(state.config.cache.page_size))


def _decide_memory(state: _State, plan: MemoryPlan) -> None:
    limited = plan.num_tokens < _useful_tokens(state)
    share = "all memory that may be used" if limited else "enough for all running requests"
    given = state.config.cache.max_tokens != "auto"
    why = "for cache.max_tokens" if given else share
    memory_given = state.config.cache.memory != "auto"
    if given or state.config.device == "cpu":  # other devices are measured after loading the model
        state.decide("cache.memory", plan.kv_bytes, why)
    fits = f"fit into {size_text(plan.kv_bytes)}"
    state.decide("cache.max_tokens", plan.num_tokens, fits if memory_given or limited else share)
    longest = state.facts.model.context_len
    most = plan.num_tokens // state.config.parallel.attention_groups  # a request has one group
    if 0 < most < longest:
        state.decide("context_len", most, "the KV cache holds no more")
    state.decide("context_len", longest, "the model's maximum")


def _number(value: object) -> int:
    """A resolved value; 16 if `auto` is left, which `check` reports."""
    return value if isinstance(value, int) else 16


_STEPS: tuple[Callable[[_State], None], ...] = (
    _task,
    _device,
    _dtype,
    _fallback,
    _attention,
    _runner,
    _deterministic,
    _same_bits,
    _names,
    _load_cache,
    _pages,
    _recurrent,
    _batch,
    _speculative,
    _lora,
    _overlap,
)
