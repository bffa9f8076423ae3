"""Step plans and results as bytes: for files, other processes and other machines.

MessagePack of msgspec structs; arrays travel as little-endian bytes with their type and shape.
Entries of capabilities are decoded by the types they declare.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np

from sylvan.protocol.commands import CommandResult, ExecutorCommand
from sylvan.protocol.errors import ExecutorError
from sylvan.runtime.core.step import STEP_FORMAT, StepPlan, StepResult

_ARRAY = 1
_TYPES = ("<i4", "<i8", "<f4", "<f8", "|u1", "|b1", "<f2")


class StepCodec:
    """Encodes and decodes both directions of the step contract, and of commands between steps.

    Args:
        work_types: Types of the entries of `StepPlan.work`, by capability.
        report_types: Types of the entries of `StepResult.reports`, by capability.
    """

    def __init__(self, work_types: Mapping[str, Any], report_types: Mapping[str, Any]) -> None:
        self._work_types, self._report_types = dict(work_types), dict(report_types)
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_encode)
        self._plans = msgspec.msgpack.Decoder(StepPlan, ext_hook=_array, dec_hook=_check)
        self._commands = msgspec.msgpack.Decoder(ExecutorCommand, ext_hook=_array, dec_hook=_check)
        self._answers = msgspec.msgpack.Decoder(CommandResult)
        self._results = msgspec.msgpack.Decoder(StepResult, ext_hook=_array, dec_hook=_check)

    def encode(self, message: StepPlan | StepResult | ExecutorCommand | CommandResult) -> bytes:
        """Encode a plan, a result, a command or a command's result."""
        return self._encoder.encode(message)

    def plan(self, data: bytes) -> StepPlan:
        """Decode a plan.

        Raises:
            ExecutorError: malformed bytes, another format, or work of an unknown capability.
        """
        plan = self._decode(self._plans, data)
        if plan.format != STEP_FORMAT:
            raise ExecutorError(
                f"a step plan of format {plan.format}; this version reads {STEP_FORMAT}"
            )
        plan.work = self._convert(plan.work, self._work_types)
        return plan

    def result(self, data: bytes) -> StepResult:
        """Decode a result.

        Raises:
            ExecutorError: malformed bytes, or a report of an unknown capability.
        """
        result = self._decode(self._results, data)
        result.reports = self._convert(result.reports, self._report_types)
        return result

    def command(self, data: bytes) -> ExecutorCommand:
        """Decode a command.

        Raises:
            ExecutorError: malformed bytes, or an unknown command.
        """
        return self._decode(self._commands, data)

    def answer(self, data: bytes) -> CommandResult:
        """Decode a command's result.

        Raises:
            ExecutorError: malformed bytes.
        """
        return self._decode(self._answers, data)

    def _decode(self, decoder: msgspec.msgpack.Decoder[Any], data: bytes) -> Any:
        try:
            return decoder.decode(data)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise ExecutorError(f"malformed step: {error}") from error

    def _convert(self, parts: Mapping[str, Any], types: Mapping[str, Any]) -> dict[str, Any]:
        unknown = parts.keys() - types.keys()
        if unknown:
            raise ExecutorError(f"a step names unknown capabilities: {sorted(unknown)}")
        try:
            return {
                name: msgspec.convert(part, types[name] | None, strict=False, dec_hook=_check)
                for name, part in parts.items()
            }
        except msgspec.ValidationError as error:
            raise ExecutorError(f"malformed step: {error}") from error


def _encode(value: object) -> object:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} may not travel in a step")
    array = np.ascontiguousarray(value)
    code = _TYPES.index(array.dtype.newbyteorder("<").str)
    shape = np.array([code, array.ndim, *array.shape], "<i8")
    return msgspec.msgpack.Ext(_ARRAY, shape.tobytes() + array.tobytes())


def _array(code: int, data: memoryview) -> np.ndarray[Any, Any]:
    if code != _ARRAY:
        raise ValueError(f"unknown extension {code}")
    head = np.frombuffer(data[:16], "<i8")
    kind, ndim = int(head[0]), int(head[1])
    if not 0 <= kind < len(_TYPES) or not 0 <= ndim <= 8:
        raise ValueError("malformed array")
    start = 16 + 8 * ndim
    shape = np.frombuffer(data[16:start], "<i8").tolist()
    return np.frombuffer(data[start:], _TYPES[kind]).reshape(shape).copy()


def _check(kind: type, value: object) -> object:
    if not isinstance(value, kind):
        raise ValueError(f"expected {kind.__name__}, got {type(value).__name__}")  # noqa: TRY004
    return value
