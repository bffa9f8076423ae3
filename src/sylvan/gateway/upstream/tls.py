"""TLS configuration of connections to workers."""

from __future__ import annotations

import ssl

from sylvan.config.route import WorkersConfig
from sylvan.protocol.errors import ConfigError


def worker_tls(config: WorkersConfig) -> ssl.SSLContext:
    """Load the trusted certificates, and the client certificate.

    Raises:
        ConfigError: A file is unusable, or only one of certificate and key is given.
    """
    certificate, key = config.client_certfile, config.client_keyfile
    if (certificate is None) is not (key is None):
        raise ConfigError("workers.client_certfile and workers.client_keyfile must be set together")
    context = ssl.create_default_context()
    for path in config.ca_certfiles:
        try:
            context.load_verify_locations(path)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"workers.ca_certfiles: {path}: {error}") from error
    if certificate is not None:
        try:
            context.load_cert_chain(certificate, key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"workers.client_certfile, workers.client_keyfile: {error}"
            ) from error
    return context
