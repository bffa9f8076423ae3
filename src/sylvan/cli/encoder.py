"""`sylvan serve` with `media.encoder_only`: an HTTP server around a model's encoder."""

from __future__ import annotations

import asyncio
import logging
import socket

from sylvan.cli.banner import address
from sylvan.cli.loop import fast_loop
from sylvan.cli.main import DONE
from sylvan.cli.service import Service
from sylvan.config import Config
from sylvan.config.checkpoint import model_dir
from sylvan.protocol.errors import ConfigError
from sylvan.utils.threads import call_in_thread

logger = logging.getLogger(__name__)


def serve_encoder(
    config: Config, sock: socket.socket | None, *, quiet: bool, until_eof: bool
) -> int:
    """Serve the encoder until this process is asked to stop.

    Raises:
        ConfigError: The model has none, or it cannot be loaded.
    """
    with asyncio.Runner(loop_factory=fast_loop()) as runner:
        runner.run(_serve(config, sock, quiet=quiet, until_eof=until_eof))
    return DONE


async def _serve(
    config: Config, sock: socket.socket | None, *, quiet: bool, until_eof: bool
) -> None:
    from sylvan.cli.http import HttpServer, StopSignal
    from sylvan.media.pool import MediaWorkers
    from sylvan.runtime.features.multimodal.build import encoder_of
    from sylvan.runtime.features.multimodal.encoder_service import EncoderService
    from sylvan.runtime.server.connections import ConnectionLimits, Connections
    from sylvan.runtime.server.encoder_app import EncoderApp

    if config.media.encoder_urls:
        raise ConfigError("media.encoder_only and media.encoder_urls: choose one")
    with StopSignal(at_eof=until_eof) as stop:
        encoder = await call_in_thread(encoder_of, config)
        media = config.media
        workers = MediaWorkers(model_dir(config.model), media.workers, media.process_s)
        service = EncoderService(workers, encoder, media, config.scheduler.max_waiting_reqs)
        app = EncoderApp(service, media.item_bytes, config.server.api_key).app
        connections = Connections(ConnectionLimits.from_config(config.limits))
        try:
            async with HttpServer(app, config.server, sock, connections) as http:
                if not quiet:
                    name, url = model_dir(config.model).name, address(config.server, http.port)
                    print(f"Sylvan serves {name} at {url} (the encoder only)", flush=True)
                manager = Service.from_environment()
                manager.ready()
                await stop.wait()
                manager.stopping()
        finally:
            await service.close()
    logger.info("stopped")
