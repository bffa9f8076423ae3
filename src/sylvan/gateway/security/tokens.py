"""Verifies operators' identity tokens (JWT); needs the extra `jwt`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, cast
from urllib.parse import urlsplit

import jwt
import msgspec

from sylvan.config.route import ControlConfig
from sylvan.gateway.errors import UpstreamError
from sylvan.gateway.security.principal import ROLES, Principal, Role
from sylvan.gateway.upstream.http import HttpUpstream, Outgoing, json_of
from sylvan.protocol.errors import ConfigError
from sylvan.utils.clock import Clock

logger = logging.getLogger(__name__)

ALGORITHMS = (
    *("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"),
    *("ES256", "ES384", "ES512", "EdDSA"),
)
"""Asymmetric algorithms only: the provider alone holds the signing key."""
MAX_TOKEN_CHARS = 16384
MAX_KEYS_BYTES = 1 << 20
TIMEOUT_S = 5.0
KEEP_S = 600.0
"""Seconds after which the provider's keys are fetched again, so that revoked keys stop working."""
RETRY_S = 10.0
"""A token with an unknown key triggers a fetch, at most once in this many seconds."""
LEEWAY_S = 30.0
"""Tolerated clock skew between provider and gateway, in seconds."""
WELL_KNOWN = "/.well-known/openid-configuration"
CLAIMS = ("roles", "groups", "role")


class IdentityTokens:
    """Verifies tokens that an issuer signed for this gateway; belongs to one event loop.

    Args:
        config: Issuer, audience, location of the keys, and role mapping.
        upstream: Fetches the keys.
        clock: Clock for their age.

    Raises:
        ConfigError: A setting is missing or malformed.
    """

    def __init__(self, config: ControlConfig, upstream: HttpUpstream, clock: Clock) -> None:
        self._issuer, self._audience = config.jwt_issuer or "", config.jwt_audience or ""
        if not self._issuer or not self._audience:
            raise ConfigError("control.jwt_issuer and control.jwt_audience must be set together")
        for path, url in (
            ("control.jwt_issuer", self._issuer),
            ("control.jwt_jwks_uri", config.jwt_jwks_uri),
        ):
            if url is not None:
                _check_url(path, url)
        self._roles: Mapping[str, Role] = _mapping(config.jwt_role_mapping)
        self._keys_url = config.jwt_jwks_uri
        self._upstream = upstream
        self._clock = clock
        self._keys: Mapping[str | None, jwt.PyJWK] = {}
        self._fetched_s: float | None = None
        self._tried_s: float | None = None
        self._lock = asyncio.Lock()

    async def check(self, token: str) -> Principal | None:
        """Return the principal of a token; None if it is malformed, expired, or not for us.

        Raises:
            UpstreamError: The provider's keys are unknown and cannot be fetched.
        """
        if token.count(".") != 2 or len(token) > MAX_TOKEN_CHARS:
            return None
        try:
            header = jwt.get_unverified_header(token)
            key = await self._key(header.get("kid"))
            if key is None or header.get("alg") not in ALGORITHMS:
                return None
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=list(ALGORITHMS),
                audience=self._audience,
                issuer=self._issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except jwt.PyJWTError as error:
            logger.info("an operator's token was rejected: %s", error)
            return None
        name = str(claims["sub"])[:256]
        return Principal(name, self._role(claims), name)

    def _role(self, claims: Mapping[str, Any]) -> Role:
        named = [name for claim in CLAIMS for name in _names(claims.get(claim))]
        roles = {self._roles[name] for name in named if name in self._roles}
        return "admin" if "admin" in roles else "user"

    async def _key(self, key_id: object) -> jwt.PyJWK | None:
        async with self._lock:
            now = self._clock()
            old = self._fetched_s is None or now - self._fetched_s > KEEP_S
            unknown = key_id not in self._keys
            tried_lately = self._tried_s is not None and now - self._tried_s < RETRY_S
            if (old or unknown) and not tried_lately:
                self._tried_s = now
                try:
                    self._keys = await self._fetch()
                    self._fetched_s = now
                except UpstreamError as error:
                    logger.warning("keys of %s cannot be fetched: %s", self._issuer, error)
            if self._fetched_s is None:
                message = "The keys of the identity provider cannot be fetched."
                raise UpstreamError(message, kind="status", status=503)
            if key_id is None and len(self._keys) == 1:
                return next(iter(self._keys.values()))
            return self._keys.get(cast("str | None", key_id))

    async def _fetch(self) -> Mapping[str | None, jwt.PyJWK]:
        if self._keys_url is None:
            about = await self._document(f"{self._issuer.rstrip('/')}{WELL_KNOWN}")
            found = about.get("jwks_uri")
            if not isinstance(found, str) or about.get("issuer") != self._issuer:
                raise UpstreamError(
                    "The discovery document names an issuer other than control.jwt_issuer.",
                    kind="protocol",
                )
            keys_url = found
        else:
            keys_url = self._keys_url
        document = await self._document(keys_url)
        try:
            rows = msgspec.convert(document.get("keys"), list[dict[str, Any]])
        except msgspec.ValidationError as error:
            raise UpstreamError(
                "The identity provider's answer contains no keys.", kind="protocol"
            ) from error
        keys: dict[str | None, jwt.PyJWK] = {}
        for row in rows:
            if row.get("use", "sig") != "sig":
                continue
            try:
                keys[row.get("kid")] = jwt.PyJWK(row)
            except jwt.PyJWTError as error:  # an unsupported kind of key
                logger.info("a key of %s is not usable: %s", self._issuer, error)
        return keys

    async def _document(self, url: str) -> Mapping[str, object]:
        try:
            _check_url("jwks_uri", url)
        except ConfigError as error:
            raise UpstreamError(str(error), kind="protocol") from error
        parts = urlsplit(url)
        target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
        request = Outgoing(method="GET", url=f"{parts.scheme}://{parts.netloc}", target=target)
        answer = await self._upstream.call(request, TIMEOUT_S, MAX_KEYS_BYTES)
        if answer.status != 200:
            raise UpstreamError(f"{url} answers with status {answer.status}.", kind="status")
        return json_of(answer.body)


def _mapping(given: Mapping[str, str]) -> Mapping[str, Role]:
    """Map the provider's roles to ours; by default, roles of the same name.

    Raises:
        ConfigError: A role maps to an unknown role.
    """
    if not given:
        return {role: role for role in ROLES}
    found: dict[str, Role] = {}
    for theirs, ours in given.items():
        if ours not in ROLES:
            message = f"control.jwt_role_mapping: {theirs}: expected {' | '.join(ROLES)}"
            raise ConfigError(f"{message}, got {ours[:40]!r}")
        found[theirs] = ours
    return found


def _names(claim: object) -> Sequence[str]:
    if isinstance(claim, str):
        return claim.split()
    if isinstance(claim, list):
        return [name for name in cast("list[object]", claim) if isinstance(name, str)]
    return ()


def _check_url(path: str, url: str) -> None:
    """Reject keys over plain HTTP from another host: an attacker could replace them.

    Raises:
        ConfigError: The address is malformed, or is neither local nor TLS.
    """
    try:
        parts = urlsplit(url)
        host = parts.hostname
    except ValueError as error:
        raise ConfigError(f"{path}: {url[:200]!r} is not an address: {error}") from error
    here = host in ("localhost", "127.0.0.1", "::1")
    if not host or parts.scheme not in (("https", "http") if here else ("https",)):
        raise ConfigError(f"{path}: expected https:// and a host, got {url[:200]!r}")
