"""From the configuration to both halves of a role."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sylvan.config.tree import DisaggConfig
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.cache.groups import KVGroup
from sylvan.runtime.core.memory import PageMemory
from sylvan.runtime.executor.capability import CapabilityWorker
from sylvan.runtime.executor.options import ModelSite
from sylvan.runtime.features.disagg.channel import Network
from sylvan.runtime.features.disagg.counts import TransferCounts
from sylvan.runtime.features.disagg.decode import DecodeRole
from sylvan.runtime.features.disagg.prefill import PrefillRole
from sylvan.runtime.features.disagg.receiver import Receiver
from sylvan.runtime.features.disagg.sender import Sender
from sylvan.runtime.features.disagg.tcp import TcpNetwork
from sylvan.runtime.features.disagg.worker import DecodeWorker, PrefillWorker
from sylvan.runtime.sched.capability import Capability
from sylvan.runtime.storage.manifest import Manifest

logger = logging.getLogger(__name__)

STAGED_SHARE = 4
"""Pages on their way to decode servers take at most so much host memory: a share of all pages."""
_LEAST_STAGED = 32 << 20
MIN_SECRET = 16
"""Bytes."""
_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(slots=True, eq=False)
class DisaggParts:
    """What is made of the settings, in the order in which a server is put together.

    First `workers` for the executor, then `open` once the executor is there, then `controls`.

    Attributes:
        settings: Of the configuration; None: this server does everything, and there are no parts.
        host: Where the server listens.
        network: Makes channels.
        counts: What happened to the KV of prompts.
        port: Where decode servers are let in; 0 for a decode server.
    """

    settings: DisaggConfig | None
    host: str
    network: Callable[[], Network] = TcpNetwork
    counts: TransferCounts = field(default_factory=TransferCounts)
    port: int = 0
    _worker: PrefillWorker | DecodeWorker | None = None
    _memory: Callable[[], tuple[Sequence[KVGroup], Sequence[PageMemory]]] | None = None
    _identity: Manifest | None = None

    @property
    def workers(self) -> tuple[Callable[[ModelSite], CapabilityWorker], ...]:
        """What makes the worker half."""
        return (self._make_worker,) if self.settings is not None else ()

    def _make_worker(self, site: ModelSite) -> CapabilityWorker:
        self._memory = site.memory
        if self._given.role == "prefill":
            self._worker = PrefillWorker(self._sender)
        else:
            self._worker = DecodeWorker(self._receiver)
        return self._worker

    def open(self, identity: Callable[[Sequence[KVGroup], Sequence[PageMemory]], Manifest]) -> None:
        """Start the transfer, for the model that was built.

        Raises:
            ConfigError: this model's KV cannot be handed over, or the port is taken.
        """
        if self.settings is None:
            return
        assert self._memory is not None
        groups, memory = self._memory()
        kinds = {group.kind for group in groups}
        if len(groups) != 1 or not kinds <= {"full", "latent"}:
            raise ConfigError(
                f"disagg.role={self.settings.role}: this model keeps {', '.join(sorted(kinds))} "
                "layers; only the KV of models whose layers all attend to everything is handed over"
            )
        self._identity = identity(groups, memory)
        if isinstance(self._worker, PrefillWorker):
            sender = self._worker.open()
            self.port = sender.listen(self.host, self.settings.bootstrap_port)
            logger.info("decode servers are let in at %s:%d", self.host, self.port)
            if self.host not in _LOOPBACK and self.settings.secret_file is None:
                logger.warning(
                    "disagg.secret_file is not set: whoever reaches port %d of %s with this model "
                    "may read the KV of requests whose room it guesses",
                    self.port,
                    self.host,
                )
        elif self._worker is not None:
            self._worker.open()

    def controls(self) -> tuple[Capability, ...]:
        """The control half."""
        settings = self.settings
        if settings is None:
            return ()
        memory = self._pages()
        if settings.role == "decode":
            decode = DecodeRole(
                memory.page_size,
                settings.timeout_s,
                falls_back=settings.fallback == "local",
                counts=self.counts,
            )
            return (decode,)
        staged = max(_LEAST_STAGED, memory.num_pages * memory.page_bytes // STAGED_SHARE)
        prefill = PrefillRole(
            memory.page_size, memory.page_bytes, staged, settings.timeout_s, self.counts
        )
        return (prefill,)

    def state(self) -> dict[str, Any]:
        """For operators."""
        if self.settings is None:
            return {}
        own = {"role": self.settings.role, "bootstrap_port": self.port, **asdict(self.counts)}
        return {"disaggregation": own}

    @property
    def _given(self) -> DisaggConfig:
        assert self.settings is not None
        return self.settings

    def _pages(self) -> PageMemory:
        assert self._memory is not None
        return self._memory()[1][0]

    def _sender(self) -> Sender:
        assert self._identity is not None
        settings = self._given
        return Sender(
            self.network(),
            self._pages(),
            self._identity,
            self._secret,
            shares=settings.transfer != "tcp",
            patience_s=settings.timeout_s,
        )

    def _receiver(self) -> Receiver:
        assert self._identity is not None
        shares = {"auto": None, "shm": True, "tcp": False}[self._given.transfer]
        return Receiver(self.network(), self._pages(), self._identity, self._secret, shares=shares)

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
