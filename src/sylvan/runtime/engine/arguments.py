"""The keywords of `sylvan.Engine` as an object."""

from __future__ import annotations

import msgspec

from sylvan.config import Config
from sylvan.config.check import check
from sylvan.config.load import LoadedConfig
from sylvan.config.resolve import resolve
from sylvan.config.sources import from_keywords, gather
from sylvan.protocol.errors import ConfigError
from sylvan.runtime.engine.facts import gather_facts


class ServerArgs:
    """Fields of the configuration, under our names or SGLang's, for `Engine(server_args=...)`.

    Example:
        >>> args = ServerArgs(model_path="sapling", cache__page_size=16)  # doctest: +SKIP

    Attributes:
        keywords: The given keywords.

    Raises:
        ConfigError: A keyword is unknown, or its value is invalid.
    """

    def __init__(self, **keywords: object) -> None:
        self.keywords = keywords
        self._loaded = gather(from_keywords(keywords))

    @property
    def config(self) -> Config:
        """The configuration before `auto` is resolved."""
        return self._loaded.config

    @property
    def loaded(self) -> LoadedConfig:
        """The configuration, and the origin of each value."""
        return self._loaded


def configuration(args: ServerArgs) -> Config:
    """Return the resolved configuration of an engine.

    Raises:
        ConfigError: The model cannot be served this way; the message says what to change.
    """
    loaded = args.loaded
    config = loaded.config
    if config.server.replicas > 1:
        spelled = loaded.given["server.replicas"].spelled
        raise ConfigError(f"{spelled}: an Engine is one replica; sylvan serve --dp runs several")
    if config.parallel.placement == "ray":
        raise ConfigError("parallel.placement=ray: only sylvan serve has Ray start other machines")
    if "processes" not in loaded.given and config.parallel.ranks == 1:
        config = msgspec.structs.replace(config, processes="one")
    facts = gather_facts(config)
    result = resolve(config, facts)
    check(result, facts)
    return result.config
