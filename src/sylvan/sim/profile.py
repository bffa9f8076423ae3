"""The profile of a model on a machine: setup of the scheduler, and cost of its steps."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from sylvan.protocol.errors import ConfigError
from sylvan.runtime.cache.groups import KVGroup, check_groups
from sylvan.runtime.executor.api import ExecutorCaps
from sylvan.runtime.sched.limits import SchedulerLimits
from sylvan.sim.cost import HostCost, RequestCost, StepCost

FORMAT = 1
MAX_BYTES = 1 << 20


class SchedulerProfile(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, dict=True
):
    """Setup of a scheduler; as in `flight_recorder.recording.SchedulerSetup`.

    Attributes:
        kv_groups: KV groups, in page table order.
        prefix: Whether prefixes are cached.
        eviction: Eviction policy of the cache.
        policy: Scheduling policy.
        settings: Fields of `sched.limits.SchedulerLimits`.
        num_slots: Request slots of the executor.
        lockstep: See `ExecutorCaps`.
        max_samples: See `ExecutorCaps`.
        seed: Seed of random policies.
        tenant_weights: Weights for weighted policies.
    """

    kv_groups: tuple[KVGroup, ...]
    prefix: Literal["radix", "none"] = "radix"
    eviction: str = "lru"
    policy: str = "fcfs"
    settings: dict[str, Any] = {}
    num_slots: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    lockstep: bool = False
    max_samples: Annotated[int, msgspec.Meta(ge=0)] = 0
    seed: int = 0
    tenant_weights: dict[str, float] = {}

    @cached_property
    def limits(self) -> SchedulerLimits:
        """Limits of the scheduler."""
        return SchedulerLimits(**self.settings)

    @cached_property
    def caps(self) -> ExecutorCaps:
        """Capabilities of the executor."""
        return ExecutorCaps(
            max_batch_tokens=self.limits.max_batch_tokens,
            max_running_reqs=self.num_slots,
            kv_groups=self.kv_groups,
            lockstep=self.lockstep,
            max_samples=self.max_samples,
        )

    @property
    def cache_tokens(self) -> int:
        """Capacity of the KV cache in tokens."""
        first = self.kv_groups[0]
        return (first.num_pages - 1) * first.page_size

    def with_cache(self, tokens: int) -> SchedulerProfile:
        """Return the same with another KV cache size; all groups scale alike.

        Raises:
            ConfigError: It is too small for a request.
        """
        ratio = tokens / self.cache_tokens
        groups: list[KVGroup] = []
        for number, group in enumerate(self.kv_groups):
            exact = -(-tokens // group.page_size) if number == 0 else group.num_pages * ratio
            fields = {name: getattr(group, name) for name in ("name", "kind", "page_size")}
            pages = int(exact) + 1
            groups.append(KVGroup(**fields, window=group.window, num_pages=pages))
        try:
            check_groups(groups)
        except ValueError as error:
            raise ConfigError(f"sim.cache_tokens: {tokens} tokens: {error}") from error
        return msgspec.structs.replace(self, kv_groups=tuple(groups))


class ProfileOrigin(msgspec.Struct, frozen=True, kw_only=True):
    """Origin of a profile.

    Attributes:
        recording: Directory of the recording.
        started: UTC start time of the recorded scheduler.
        results: Results file of the load test, if there was one.
        steps: Number of steps in the fit.
        requests: Number of requests in them.
        max_rows: Rows of the largest step.
        step_error: Mean relative error of step durations.
        model: Name of the model, if a load test reported it.
    """

    recording: str = ""
    started: str = ""
    results: str = ""
    steps: int = 0
    requests: int = 0
    max_rows: int = 0
    step_error: float = 0.0
    model: str = ""


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file written by `sylvan simulate fit`."""

    format: int = FORMAT
    engine: SchedulerProfile
    step: StepCost
    host: HostCost
    request: RequestCost = RequestCost()
    origin: ProfileOrigin = ProfileOrigin()


def read(name: str) -> Profile:
    """Read a profile.

    Raises:
        ConfigError: It is unreadable or invalid; the message names the field and its limit.
    """
    path = Path(name).expanduser()
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"sim.profile: {name} is larger than {MAX_BYTES >> 20} MiB")
        found = msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        raise ConfigError(f"sim.profile: cannot read {name}: {error.strerror}") from error
    except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"sim.profile: {name}: {error}") from error
    if found.format != FORMAT:
        raise ConfigError(
            f"sim.profile: {name} is of format {found.format}; this version reads {FORMAT}"
        )
    try:
        check_groups(found.engine.kv_groups)
        inflight = found.engine.limits.inflight
    except (TypeError, ValueError) as error:
        raise ConfigError(f"sim.profile: {name}: engine: {error}") from error
    if inflight < 1:
        raise ConfigError(f"sim.profile: {name}: engine.settings.inflight is {inflight}, not >= 1")
    return found


def write(profile: Profile, name: str) -> None:
    """Write a profile.

    Raises:
        ConfigError: It cannot be written.
    """
    data = msgspec.json.format(msgspec.json.encode(profile))
    try:
        Path(name).expanduser().write_bytes(data + b"\n")
    except OSError as error:
        raise ConfigError(f"-o {name} cannot be written: {error.strerror}") from error
