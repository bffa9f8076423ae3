"""Builds both halves of a disaggregation role from the configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import torch

from sylvan.config.tree import DisaggConfig
from sylvan.kernels.api import Communicator
from sylvan.protocol.disagg import DisaggLoad
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.cache.groups import KVGroup
from sylvan.runtime.cache.manager import KVCacheManager
from sylvan.runtime.core.memory import PageMemory
from sylvan.runtime.executor.capability import CapabilityWorker
from sylvan.runtime.executor.options import ModelContext
from sylvan.runtime.features.disagg.channel import Network
from sylvan.runtime.features.disagg.counts import TransferStats
from sylvan.runtime.features.disagg.decode import DecodeRole, MissingKVPolicy
from sylvan.runtime.features.disagg.kv_layout import KVLayout
from sylvan.runtime.features.disagg.mechanisms import transfer_mechanisms
from sylvan.runtime.features.disagg.prefill import PrefillRole
from sylvan.runtime.features.disagg.prefill_client import PrefillClient
from sylvan.runtime.features.disagg.receiver import Receiver
from sylvan.runtime.features.disagg.sender import Sender
from sylvan.runtime.features.disagg.store import SharedStore
from sylvan.runtime.features.disagg.tcp import TcpNetwork
from sylvan.runtime.features.disagg.worker import DecodeWorker, PrefillWorker
from sylvan.runtime.sched.capability import Capability
from sylvan.runtime.storage.manifest import Manifest

logger = logging.getLogger(__name__)

MIN_SECRET = 16
"""Bytes."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(slots=True, eq=False)
class DisaggParts:
    """The parts of disaggregation, in the order in which a server is built.

    First `workers` for the executor, then `open` once the executor exists, then `controls`.

    Attributes:
        settings: The configuration; None: disaggregation is off.
        host: Listening address of the server.
        http_port: Its HTTP port; 0: unknown, or not plain HTTP.
        api_key: Key of this server and of those that it asks.
        network: Creates channels.
        records: Counters and histograms of transfers.
        port: Bootstrap port; 0 for a decode server.
    """

    settings: DisaggConfig | None
    host: str
    http_port: int = 0
    api_key: str = ""
    network: Callable[[], Network] = TcpNetwork
    records: TransferStats = field(default_factory=TransferStats)
    port: int = 0
    _prefill: PrefillWorker | None = None
    _decode: DecodeWorker | None = None
    _ranks: Communicator | None = None
    _memory: Callable[[], tuple[Sequence[KVGroup], Sequence[PageMemory]]] | None = None
    _controls: tuple[PrefillRole | DecodeRole, ...] = ()
    _identity: Manifest | None = None

    @property
    def workers(self) -> tuple[Callable[[ModelContext], CapabilityWorker], ...]:
        """Return the factory of the worker half."""
        makers = {"prefill": self._make_prefill, "decode": self._make_decode}
        return tuple(makers[role] for role in self._roles)

    @property
    def _roles(self) -> Sequence[str]:
        """Return which halves exist: both if the role can change."""
        if self.settings is None or self.settings.role is None:
            return ()
        return ("prefill", "decode") if self.settings.switchable else (self.settings.role,)

    @property
    def receives(self) -> bool:
        """Whether KV of requests with a room may come from another server."""
        return "decode" in self._roles

    def _make_prefill(self, context: ModelContext) -> CapabilityWorker:
        self._memory, self._ranks = context.memory, context.build.mesh.tp
        self._prefill = PrefillWorker(self._sender, self._ranks)
        return self._prefill

    def _make_decode(self, context: ModelContext) -> CapabilityWorker:
        self._memory, self._ranks = context.memory, context.build.mesh.tp
        self._decode = DecodeWorker(self._receiver, self._ranks)
        return self._decode

    def open(self, identity: Callable[[Sequence[KVGroup], Sequence[PageMemory]], Manifest]) -> None:
        """Start the transfer service for the built model; collective.

        Decode servers know the port of the first rank, which redirects their other ranks to this
        server's other ranks; these use any free port.

        Raises:
            ConfigError: This model's KV cannot be transferred, or the port is taken.
        """
        if self.settings is None:
            return
        assert self._memory is not None
        assert self._ranks is not None
        groups, memory = self._memory()
        rank, size = self._ranks.rank, self._ranks.size
        self._identity = msgspec.structs.replace(identity(groups, memory), shards=(size, rank))
        if self._prefill is not None:
            sender = self._prefill.open()
            self.port = sender.listen(self.host, 0 if rank else self.settings.bootstrap_port)
            sender.rank_ports = _gathered(self._ranks, self.port)
            logger.info("accepting decode servers at %s:%d", self.host, self.port)
            if not rank and self.host not in _LOOPBACK and self.settings.secret_file is None:
                logger.warning(
                    "disagg.secret_file is not set: whoever reaches port %d of %s with this model"
                    " can read the KV of requests whose room is guessed",
                    self.port,
                    self.host,
                )
        if self._decode is not None:
            self._decode.open()

    def controls(self, cache: KVCacheManager, store: SharedStore | None) -> tuple[Capability, ...]:
        """Build the control half.

        Args:
            cache: Prefix cache of the scheduler.
            store: The store that both servers use, if any.
        """
        settings = self.settings
        if settings is None:
            return ()
        assert self._memory is not None
        groups, _ = self._memory()
        shape = KVLayout(groups)
        through = store if settings.transfer == "store" else None
        found: list[PrefillRole | DecodeRole] = []
        if "prefill" in self._roles:
            prefill = PrefillRole(
                shape,
                cache,
                settings.timeout_s,
                self.records,
                store=through,
            )
            found.append(prefill)
        if "decode" in self._roles:
            policy = MissingKVPolicy(
                falls_back=settings.fallback == "local",
                asks_again=settings.retraction == "prefill" and through is None,
            )
            decode = DecodeRole(shape, settings.timeout_s, self.records, policy, store=through)
            found.append(decode)
        self._controls = tuple(found)
        return self._controls

    def state(self) -> dict[str, Any]:
        """Return the state for operators."""
        if self.settings is None:
            return {}
        own = {
            "role": self.settings.role,
            "bootstrap_port": self.port,
            **asdict(self.records.counts),
        }
        return {"disaggregation": own}

    def load(self) -> DisaggLoad | None:
        """Return the load for metrics; None without a role."""
        if self.settings is None or self.settings.role is None:
            return None
        queues = {name: n for control in self._controls for name, n in control.queues().items()}
        times = self.records.times
        return DisaggLoad(
            mode=self.settings.role,
            bootstrap_failed=self.records.counts.unmet + self.records.counts.refused,
            transfer_failed=self.records.counts.failed - self.records.counts.unmet,
            prefill_retries=self.records.counts.again,
            speed_gb_s=times.speed_gb_s.spread,
            latency_ms=times.latency_ms.spread,
            bootstrap_ms=times.bootstrap_ms.spread,
            alloc_ms=times.alloc_ms.spread,
            total_mb=times.total_mb.spread,
            last_speed_gb_s=times.last_speed_gb_s,
            last_latency_ms=times.last_latency_ms,
            **queues,
        )

    @property
    def _given(self) -> DisaggConfig:
        assert self.settings is not None
        return self.settings

    def _pages(self) -> Sequence[PageMemory]:
        assert self._memory is not None
        return self._memory()[1]

    def _sender(self) -> Sender:
        assert self._identity is not None
        settings = self._given
        return Sender(
            self.network(),
            self._pages(),
            self._identity,
            self._secret,
            replace(
                transfer_mechanisms(settings.transfer, self._pages(), self.host),
                http_port=self.http_port,
            ),
            patience_s=settings.timeout_s,
        )

    def _receiver(self) -> Receiver:
        assert self._identity is not None
        how = transfer_mechanisms(self._given.transfer, self._pages(), self.host)
        client = PrefillClient(self.api_key, self._given.timeout_s)
        return Receiver(self.network(), self._pages(), self._identity, self._secret, how, client)

    @property
    def _secret(self) -> bytes:
        path = self._given.secret_file
        if path is None:
            return b""
        try:
            secret = Path(path).read_bytes().strip()
        except OSError as error:
            raise ConfigError(f"disagg.secret_file={path}: {error.strerror}") from None
        if len(secret) < MIN_SECRET:
            raise ConfigError(
                f"disagg.secret_file={path}: it has {len(secret)} bytes; {MIN_SECRET} are needed"
            )
        return secret


def _gathered(ranks: Communicator, number: int) -> tuple[int, ...]:
    """Gather a number from each rank."""
    found = ranks.all_gather(torch.tensor([number], dtype=torch.int64))
    return tuple(found.flatten().tolist())
