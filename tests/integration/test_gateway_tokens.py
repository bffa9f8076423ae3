"""Tokens of an identity provider for the routes that steer the gateway."""

from __future__ import annotations

import json
import time
from contextlib import asynccontextmanager

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from jwt.algorithms import ECAlgorithm, RSAAlgorithm

from sylvan.config.route import ControlConfig
from sylvan.config.values import Secret
from sylvan.gateway.build import Clocks
from sylvan.gateway.security.tokens import KEEP_S, RETRY_S, IdentityTokens
from sylvan.protocol.errors import ConfigError
from sylvan.utils.clock import VirtualClock
from tests.support.cluster import gateway, served

AUDIENCE = "sylvan"


class Provider:
    """An issuer: its description and its keys."""

    def __init__(self):
        self.url = ""
        self.keys = {}
        self.asked = []
        self.status = 200

    def add(self, name, kind="rsa"):
        if kind == "rsa":
            key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
            public = RSAAlgorithm.to_jwk(key.public_key(), as_dict=True)
        else:
            key = ec.generate_private_key(ec.SECP256R1())
            public = ECAlgorithm.to_jwk(key.public_key(), as_dict=True)
        self.keys[name] = (key, {**public, "kid": name, "use": "sig"})

    def token(self, name="k1", algorithm="RS256", header=None, **changes):
        claims = {
            "iss": self.url,
            "aud": AUDIENCE,
            "sub": "ada",
            "exp": time.time() + 60,
            "roles": ["sre"],
            **changes,
        }
        claims = {key: value for key, value in claims.items() if value is not None}
        return jwt.encode(
            claims, self.keys[name][0], algorithm=algorithm, headers={"kid": name, **(header or {})}
        )

    async def __call__(self, scope, receive, send):
        self.asked.append(scope["path"])
        if scope["path"] == "/keys":
            content = {"keys": [public for _, public in self.keys.values()] + [{"kty": "odd"}]}
        else:
            content = {"issuer": self.url, "jwks_uri": f"{self.url}/keys"}
        headers = [(b"content-type", b"application/json")]
        await send({"type": "http.response.start", "status": self.status, "headers": headers})
        await send({"type": "http.response.body", "body": json.dumps(content).encode()})


@pytest.fixture(scope="module")
def drawn():
    """Keys take a while to draw."""
    provider = Provider()
    provider.add("k1")
    provider.add("k2", "ec")
    return provider.keys


@pytest.fixture
async def provider(drawn):
    made = Provider()
    made.keys = dict(drawn)
    async with served(made) as made.url:
        yield made


@asynccontextmanager
async def guarded(provider, clock=None, **changes):
    settings = {
        "control__jwt_issuer": provider.url,
        "control__jwt_audience": AUDIENCE,
        "control__jwt_role_mapping": {"sre": "admin", "dev": "user"},
        **changes,
    }
    clocks = Clocks(monotonic=clock) if clock else None
    async with gateway(wait=0, clocks=clocks, **settings) as front:
        yield front


async def status(front, token):
    reply = await front.get("/workers", headers={"authorization": f"Bearer {token}"})
    return reply.status_code


async def test_a_token_with_the_role_opens_the_control_plane(provider):
    async with guarded(provider) as front:
        assert await status(front, provider.token()) == 200
        assert await status(front, provider.token("k2", "ES256", groups=["sre"], roles=None)) == 200
        assert (await front.get("/workers")).status_code == 401
    assert provider.asked == ["/.well-known/openid-configuration", "/keys"]


async def test_the_address_of_the_keys_may_be_given(provider):
    changes = {"control__jwt_jwks_uri": f"{provider.url}/keys"}
    async with guarded(provider, **changes) as front:
        assert await status(front, provider.token()) == 200
    assert provider.asked == ["/keys"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("claims", "expected"),
    [
        ({"roles": ["dev"]}, 403),
        ({"roles": "dev sre"}, 200),
        ({"roles": ["admin"]}, 403),  # a name of ours that is not on the list
        ({"roles": None}, 403),
        ({"roles": {"sre": 1}}, 403),
        ({"aud": "somebody else"}, 401),
        ({"iss": "https://evil"}, 401),
        ({"exp": 1000}, 401),
        ({"exp": None}, 401),
        ({"sub": None}, 401),
        ({"nbf": 2**40}, 401),
    ],
)
async def test_claims_decide(provider, claims, expected):
    async with guarded(provider) as front:
        assert await status(front, provider.token(**claims)) == expected


async def test_what_another_key_signed_is_refused(provider):
    stranger = Provider()
    stranger.add("k1")
    stranger.url = provider.url
    public = provider.keys["k1"][1]
    async with guarded(provider) as front:
        assert await status(front, stranger.token()) == 401
        none = jwt.encode({"sub": "x"}, None, algorithm="none", headers={"kid": "k1"})
        assert await status(front, none) == 401
        shared = "n" * 64 + public["n"][:10]  # the public key is no shared secret
        forged = jwt.encode({"sub": "x", "aud": AUDIENCE}, shared, headers={"kid": "k1"})
        assert await status(front, forged) == 401
        for garbage in ("a.b.c", "..", "x", "a." * 9000, "{}.{}.{}"):
            assert await status(front, garbage) == 401


async def test_keys_go_and_come(provider, drawn):
    clock = VirtualClock()
    late = provider.keys.pop("k2")
    async with guarded(provider, clock) as front:
        assert await status(front, provider.token()) == 200
        provider.keys["k2"] = late
        token = provider.token("k2", "ES256")
        assert await status(front, token) == 401  # unknown keys are not fetched again at once
        assert provider.asked.count("/keys") == 1
        clock.advance(RETRY_S + 1)
        assert await status(front, token) == 200

        old = provider.token()
        del provider.keys["k1"]
        clock.advance(KEEP_S + 1)
        assert await status(front, old) == 401


async def test_without_the_provider_tokens_are_rejected_but_keys_still_work(provider):
    provider.status = 500
    keys = {"control__api_keys": (Secret("1:ops:admin:sesame"),)}
    async with guarded(provider, **keys) as front:
        reply = await front.get("/workers", headers={"authorization": f"Bearer {provider.token()}"})
        assert reply.status_code == 503
        assert "identity provider" in reply.text
        assert await status(front, "sesame") == 200


async def test_tokens_are_not_for_clients(provider):
    changes = {"server__api_key": Secret("k")}
    async with guarded(provider, **changes) as front:
        headers = {"authorization": f"Bearer {provider.token()}"}
        assert (await front.post("/generate", {"text": "x"}, headers=headers)).status_code == 401


async def test_what_operators_do_is_logged_by_name(provider, caplog):
    caplog.set_level("INFO", "sylvan.access")
    async with guarded(provider, control__audit=True) as front:
        await status(front, provider.token())
    assert "audit ada allowed GET /workers" in caplog.text


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"jwt_issuer": "https://i"}, "jwt_audience"),
        ({"jwt_issuer": "http://idp", "jwt_audience": "a"}, "expected https"),
        ({"jwt_issuer": "https://i", "jwt_audience": "a", "jwt_jwks_uri": "ftp://x"}, "jwks_uri"),
        (
            {"jwt_issuer": "https://i", "jwt_audience": "a", "jwt_role_mapping": {"x": "root"}},
            "expected admin | user",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, why):
    with pytest.raises(ConfigError) as error:
        IdentityTokens(ControlConfig(**settings), None, VirtualClock())
    assert why in str(error.value)
