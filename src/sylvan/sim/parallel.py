"""Simulates several scenarios in parallel, one process each."""

from __future__ import annotations

import multiprocessing
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkContext
from multiprocessing.process import BaseProcess

import msgspec

from sylvan.protocol.errors import ConfigError, SylvanError
from sylvan.sim.fleet import Progress
from sylvan.sim.scenarios import Result, Scenario, Study


class _Failed(msgspec.Struct, frozen=True, tag="failed"):
    message: str


class _Done(msgspec.Struct, frozen=True, tag="done"):
    result: Result


class SimulationError(SylvanError):
    """A simulating process died."""


def run_all(
    study: Study, scenarios: Sequence[Scenario], jobs: int, progress: Progress
) -> Iterator[Result]:
    """Return the results, in order; with one job, simulate in this process and report `progress`.

    Raises:
        ConfigError: A scenario cannot be simulated.
        SimulationError: A process died.
    """
    methods = multiprocessing.get_all_start_methods()
    if jobs == 1 or len(scenarios) == 1 or "fork" not in methods:
        for scenario in scenarios:
            yield study.run(scenario, progress)
        return
    context = multiprocessing.get_context("fork")  # a fork inherits the workload
    running: list[tuple[Connection, BaseProcess]] = []
    left = list(scenarios)
    try:
        while running or left:
            while left and len(running) < jobs:
                running.append(_start(context, study, left.pop(0)))
            connection, process = running[0]
            yield _received(connection)
            process.join()
            connection.close()
            running.pop(0)
    finally:
        for connection, process in running:
            process.kill()
            process.join()
            connection.close()


def _start(
    context: ForkContext, study: Study, scenario: Scenario
) -> tuple[Connection, BaseProcess]:
    ours, theirs = context.Pipe(duplex=False)
    assert isinstance(ours, Connection), "os.fork exists, so this is not Windows"
    assert isinstance(theirs, Connection)
    process = context.Process(target=_simulate, args=(theirs, study, scenario), daemon=True)
    with warnings.catch_warnings():
        # a fork may inherit locks held by other threads: what it runs takes only its own
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    theirs.close()
    return ours, process


def _simulate(connection: Connection, study: Study, scenario: Scenario) -> None:
    try:
        answer: _Done | _Failed = _Done(study.run(scenario))
    except ConfigError as error:
        answer = _Failed(str(error))
    connection.send_bytes(msgspec.msgpack.encode(answer))


def _received(connection: Connection) -> Result:
    try:
        data = connection.recv_bytes()
    except EOFError as error:
        raise SimulationError("a simulation process died; use fewer --jobs") from error
    answer = msgspec.msgpack.decode(data, type=_Done | _Failed)
    if isinstance(answer, _Failed):
        raise ConfigError(answer.message)
    return answer.result
