"""`sylvan serve` on machines other than the first: they have ranks, but no HTTP server."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from sylvan.cli.loop import fast_loop
from sylvan.cli.main import DONE
from sylvan.cli.settings import Settings
from sylvan.config.checkpoint import model_dir
from sylvan.config.env import torchrun_settings
from sylvan.config.flags import Parsed
from sylvan.config.sources import SourceSettings, combined

logger = logging.getLogger(__name__)


def with_torchrun_settings(args: Parsed) -> Parsed:
    """Combine torchrun's settings of the machines with the command line; flags win.

    Raises:
        ConfigError: torchrun starts several processes a machine.
    """
    from_env = SourceSettings(tuple(torchrun_settings()))
    return replace(args, given=combined([from_env, args.given]))


def serve_node(settings: Settings, *, quiet: bool, until_eof: bool) -> int:
    """Serve a model together with node 0 until node 0 stops, or this process is asked to.

    Raises:
        ConfigError: node 0 does not answer, or refuses; says why.
    """
    with asyncio.Runner(loop_factory=fast_loop()) as runner:
        runner.run(_serve(settings, quiet=quiet, until_eof=until_eof))
    return DONE


async def _serve(settings: Settings, *, quiet: bool, until_eof: bool) -> None:
    from sylvan.cli.http import StopSignal
    from sylvan.runtime.engine.node_agent import NodeAgent
    from sylvan.runtime.engine.nodes import given_settings
    from sylvan.runtime.storage.identity import quick_digest

    config = settings.resolved.config
    given = given_settings(config, tuple(settings.loaded.given))
    agent = NodeAgent(config, given, quick_digest(model_dir(config.model)))
    if not quiet:
        parallel, ranks = config.parallel, agent.ranks
        print(
            f"node {parallel.node_rank} of {parallel.nodes} at {parallel.address}: ranks "
            f"{ranks.start} to {ranks.stop - 1} of {parallel.ranks}",
            flush=True,
        )
    with StopSignal(at_eof=until_eof) as stop:
        await stop.unless_stopped(agent.run())
    logger.info("stopped")
