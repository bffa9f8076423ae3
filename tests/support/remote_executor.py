"""An executor in another process, driven by step plans as bytes. Run as a script, it is that
process.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import msgspec

from sylvan.protocol.commands import ExecutorCommand
from sylvan.protocol.errors import DeviceMemoryError, ExecutorError
from sylvan.runtime.core.step import StepPlan, StepResult
from sylvan.runtime.core.wire import StepCodec
from sylvan.runtime.executor.api import ExecutorCaps, FinishedCommand
from sylvan.runtime.executor.options import LocalOptions
from sylvan.runtime.features.embeddings.control import EmbeddingCapability
from sylvan.runtime.features.grammar.control import GrammarControl
from sylvan.runtime.features.lora.control import Lora
from sylvan.runtime.features.multimodal.control import Multimodal
from sylvan.runtime.features.prompt_logprobs.control import PromptLogprobsCapability
from sylvan.runtime.features.recurrent.control import RecurrentStates

CAPABILITIES = (
    EmbeddingCapability,
    PromptLogprobsCapability,
    RecurrentStates,
    GrammarControl,
    Lora,
    Multimodal,
)


def codec() -> StepCodec:
    return StepCodec(
        {c.name: c.work_type for c in CAPABILITIES},
        {c.name: c.report_type for c in CAPABILITIES if c.report_type is not None},
    )


class RemoteStep:
    def __init__(self, executor: RemoteExecutor) -> None:
        self._executor = executor
        self._result: StepResult | None = None

    def done(self) -> bool:
        return self._result is not None

    def wait(self) -> StepResult:
        if self._result is None:
            self._result = self._executor.receive()
        return self._result


class RemoteExecutor:
    """Implements `Executor` over the pipes of a child process."""

    def __init__(self, model_dir: Path, options: LocalOptions) -> None:
        module, given = "tests.support.remote_executor", msgspec.json.encode(options).decode()
        command = [sys.executable, "-m", module, str(model_dir), given]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self._child = subprocess.Popen(command, cwd=Path(__file__).parents[2], **pipes)
        self._codec = codec()
        self.sent_bytes = 0
        self.caps = msgspec.json.decode(self._read(), type=ExecutorCaps)

    def launch(self, plan: StepPlan) -> RemoteStep:
        data = self._codec.encode(plan)
        self.sent_bytes += len(data)
        write(self._child.stdin, b"p" + data)
        return RemoteStep(self)

    def control(self, command: ExecutorCommand) -> FinishedCommand:
        write(self._child.stdin, b"c" + self._codec.encode(command))
        return FinishedCommand(self._codec.answer(self._read()))

    def receive(self) -> StepResult:
        kind, data = (whole := self._read())[:1], whole[1:]
        if kind == b"r":
            return self._codec.result(data)
        raise (DeviceMemoryError if kind == b"m" else ExecutorError)(data.decode())

    def close(self) -> None:
        self._child.stdin.close()
        assert self._child.wait(30) == 0
        self._child.stdout.close()

    def _read(self) -> bytes:
        data = read(self._child.stdout)
        assert data is not None, "the executor's process is gone"
        return data


def write(stream: BinaryIO, data: bytes) -> None:
    stream.write(struct.pack("<I", len(data)) + data)
    stream.flush()


def read(stream: BinaryIO) -> bytes | None:
    size = stream.read(4)
    return stream.read(struct.unpack("<I", size)[0]) if len(size) == 4 else None


def serve(model_dir: str, options: str) -> None:
    from sylvan.runtime.executor.build import build_executor
    from sylvan.runtime.executor.options import ExecutorParts
    from sylvan.runtime.features.standard_workers import STANDARD_WORKERS
    from tests.support.grammar import build_byte_grammar

    local = msgspec.json.decode(options, type=LocalOptions)
    workers = (*STANDARD_WORKERS, lambda context: build_byte_grammar(context.vocab_size).worker)
    executor, _ = build_executor(Path(model_dir), local, parts=ExecutorParts(workers))
    steps = codec()
    write(sys.stdout.buffer, msgspec.json.encode(executor.caps))
    while (data := read(sys.stdin.buffer)) is not None:
        if data[:1] == b"c":
            result = executor.control(steps.command(data[1:])).wait()
            write(sys.stdout.buffer, steps.encode(result))
            continue
        try:
            answer = b"r" + steps.encode(executor.launch(steps.plan(data[1:])).wait())
        except ExecutorError as error:
            answer = (b"m" if isinstance(error, DeviceMemoryError) else b"e") + str(error).encode()
        write(sys.stdout.buffer, answer)
    executor.close()


if __name__ == "__main__":
    serve(*sys.argv[1:])
