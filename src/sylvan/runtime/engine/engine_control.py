"""The control routes as methods of `sylvan.Engine`."""

from __future__ import annotations

import gc
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec

from sylvan.api.native import OpenSessionBody
from sylvan.api.validation import parse
from sylvan.api.version import VERSION
from sylvan.protocol.commands import StartProfile, StopProfile
from sylvan.protocol.errors import RequestError
from sylvan.protocol.messages import (
    Command,
    ControlReply,
    FlushCache,
    GetState,
    Pause,
    Resume,
)
from sylvan.runtime.engine.hang_report import report_dir
from sylvan.runtime.serving.service import GenerationService

T = TypeVar("T")

_PROFILE_S = 120.0
_ABSENT: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "start_expert_distribution_record",
            "stop_expert_distribution_record",
            "dump_expert_distribution_record",
        ),
        "rows of experts are always counted: see expert_load of get_server_info",
    ),
    **dict.fromkeys(
        ("save_sharded_model", "save_remote_model"), "checkpoints are served as they are"
    ),
    "collective_rpc": "ranks take commands, no calls of Python functions",
}


class EngineControl:
    """The methods; the engine decides how to wait for their coroutines.

    Methods of SGLang's Engine without a meaning here raise an AttributeError that says why.
    """

    _service: GenerationService

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        raise NotImplementedError

    def __getattr__(self, name: str) -> object:
        reason = _ABSENT.get(name)
        more = f": {reason}" if reason else ""
        raise AttributeError(f"{type(self).__name__} has no {name!r}{more}")

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """Abort the live request with that ID, or all."""
        manager = self._service.manager
        self._wait(_later(manager.abort_all if abort_all else lambda: manager.abort(rid)))

    def flush_cache(self) -> bool:
        """Empty the prefix cache; False while requests are being served."""
        return self._wait(self._service.manager.control(FlushCache())).ok

    def pause_generation(self, mode: str = "abort") -> None:
        """Stop computing; see `sylvan.protocol.messages.Pause` for the modes."""
        self._wait(self._service.manager.control(msgspec.convert({"mode": mode}, Pause)))

    def continue_generation(self) -> None:
        """Resume after `pause_generation`."""
        self._wait(self._service.manager.control(Resume()))

    def open_session(
        self,
        capacity_of_str_len: int,
        session_id: str | None = None,
        streaming: bool = False,
        timeout: float | None = None,
    ) -> str:
        """Open a session, whose turns `generate` continues with `session_params`; return its ID.

        Raises:
            RequestError: The ID is taken.
            CapacityError: All other sessions are busy.
        """
        fields = {
            "capacity_of_str_len": capacity_of_str_len,
            "session_id": session_id,
            "streaming": streaming,
            "timeout": timeout,
        }
        body = parse(OpenSessionBody, fields)
        return self._wait(_later(lambda: self._service.sessions.open("", body)))

    def close_session(self, session_id: str) -> None:
        """Close a session and abort its requests, if there is one."""
        self._wait(_later(lambda: self._service.sessions.close("", session_id)))

    def start_profile(
        self,
        output_dir: str | None = None,
        activities: Sequence[str] | None = None,
        with_stack: bool = False,
        record_shapes: bool = False,
    ) -> str:
        """Start the profiler; return the directory of its files.

        Raises:
            RequestError: It is already running, or the directory is unusable.
        """
        folder = output_dir or str(report_dir(None))
        name = f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
        self._ask(
            StartProfile(
                folder=folder,
                name=name,
                activities=("CPU", "GPU") if activities is None else tuple(activities),
                with_stack=with_stack,
                record_shapes=record_shapes,
            )
        )
        return folder

    def stop_profile(self) -> list[str]:
        """Stop the profiler; return its files.

        Raises:
            RequestError: It is not running.
        """
        return list((self._ask(StopProfile()).body or {}).get("files", []))

    def freeze_gc(self) -> None:
        """Exempt current objects from garbage collection."""
        gc.collect()
        gc.freeze()

    def get_server_info(self) -> dict[str, Any]:
        """Return configuration, limits and load."""
        reply = self._wait(self._service.manager.control(GetState()))
        return {**self.get_model_info(), **(reply.body or {}), "version": VERSION}

    def get_model_info(self) -> dict[str, Any]:
        """Describe the model and its limits."""
        return msgspec.to_builtins(self._service.manager.facts)

    def _ask(self, command: Command) -> ControlReply:
        reply = self._wait(self._service.manager.control(command, timeout_s=_PROFILE_S))
        if not reply.ok:
            raise RequestError(reply.message, status=reply.status or 400)
        return reply


async def _later(call: Callable[[], T]) -> T:
    return call()
