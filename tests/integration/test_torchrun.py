"""torchrun itself starts the machines of a server."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.nodes import free_port
from tests.support.server_processes import FLAGS, completion, started, waited
from tests.support.tiny import write_model


@pytest.mark.slow
def test_torchrun_starts_two_machines(tmp_path: Path) -> None:
    model, port = write_model(tmp_path), free_port()
    while port > 60000:  # the next one is used, too
        port = free_port()
    served = "sylvan", "serve", model, *FLAGS, "--runner", "eager"
    with started(served[:1], *served[1:]) as alone:
        expected = completion(alone.ready())
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(
                started(
                    ("torch.distributed.run",),
                    *("--nnodes", 2, "--nproc-per-node", 1, "--node-rank", node),
                    *("--master-addr", "127.0.0.1", "--master-port", port),
                    *("-m", *served, "--tp", 2),
                )
            )
            for node in range(2)
        )
        assert completion(first.ready()) == expected
        assert "node 1 of 2 at 127.0.0.1" in second.printed
        assert f":{port + 1}" in second.printed
        first.stop()
        waited(lambda: second.process.poll() is not None, "the second machine did not stop")
