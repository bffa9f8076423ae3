"""Inspects the prefix cache: its contents, and why requests hit or missed."""

from __future__ import annotations

from typing import Any

import numpy as np
from starlette.responses import Response

from sylvan.api.cache import CurveQuery, ExplainQuery, TreeQuery
from sylvan.protocol.errors import RequestError
from sylvan.protocol.messages import CachePrompts, CacheRequest, CacheTree
from sylvan.runtime.cache.curve import hit_curve
from sylvan.runtime.server.endpoint import Call, json_response
from sylvan.utils.threads import call_in_thread

_UNBOUNDED = 1 << 60  # tokens


async def cache_tree(call: Call[None]) -> Response:
    """Return the prefix tree, longest nodes of each level first; a tenant sees only its own."""
    query: TreeQuery = call.query
    body = await _ask(call, CacheTree(max_nodes=query.max_nodes, owner=_owner(call)), "tree")
    owners = _owners(call)
    for node in body["nodes"]:
        node["text"] = await _text(call, node["head"])
        salt = node.pop("salt")
        node["owner"] = next((name for start, name in owners if salt.startswith(start)), None)
    return json_response({**body, "bytes_per_token": _bytes_per_token(call)})


async def cache_explain(call: Call[None]) -> Response:
    """Explain what part of a recent prompt was cached, and what limited it.

    A tenant can query only its own requests.
    """
    query: ExplainQuery = call.query
    body = await _ask(call, CacheRequest(rid=query.rid, owner=_owner(call)), "rid")
    there = body["divergence"]
    there["ours_text"] = await _text(call, there["ours"])
    there["theirs_text"] = await _text(call, there["theirs"])
    return json_response(body)


async def cache_curve(call: Call[None]) -> Response:
    """Return the hit rate of recent prompts as a function of LRU cache size, and by tier.

    For operators only: all tenants share the cache.
    """
    query: CurveQuery = call.query
    body = await _ask(call, CachePrompts(), "curve")
    prompts = [np.array(p, np.uint64) for p in body["prompts"]]
    total = call.context.engine.facts.max_total_tokens
    sizes = sorted({max(64, total * step // query.points) for step in range(1, query.points + 1)})
    tiers = _tiers(call, total)
    bounds = [size * factor for size in tiers.values() for factor in (1, 2)]
    curve = await call_in_thread(hit_curve, prompts, [*sizes, *bounds])
    points = [{"cache_tokens": size, "hit_rate": round(rate, 6)} for size, rate in curve]
    ends = points[len(sizes) :]
    return json_response(
        {
            "prompts": len(prompts),
            "cache_tokens": total,
            "curve": points[: len(sizes)],
            "tiers": [
                {
                    "tier": name,
                    "tokens": size if size < _UNBOUNDED else None,
                    "hit_rate": here["hit_rate"],
                    "hit_rate_if_doubled": doubled["hit_rate"],
                }
                for (name, size), here, doubled in zip(
                    tiers.items(), ends[::2], ends[1::2], strict=True
                )
            ],
        }
    )


def _tiers(call: Call[None], device_tokens: int) -> dict[str, int]:
    """Return the cumulative capacity in tokens down to each tier; a store counts as unbounded.

    The host tier also holds what is on the device.
    """
    found, load = {"device": device_tokens}, call.context.engine.load().tiers
    if load is not None and load.host_total_tokens:
        found["host"] = max(device_tokens, load.host_total_tokens)
    if load is not None and load.stores:
        found["storage"] = _UNBOUNDED
    return found


async def _ask(
    call: Call[None], command: CacheTree | CacheRequest | CachePrompts, param: str
) -> Any:
    reply = await call.context.engine.control(command)
    if not reply.ok or reply.body is None:
        raise RequestError("that request is not known, or no longer", param=param, status=404)
    return reply.body


def _owner(call: Call[None]) -> str | None:
    """Return None for operators and holders of the server's key, who see everything."""
    name = call.tenant.name
    return None if call.tenant.admin or not name else call.context.engine.isolation.owner(name)


def _owners(call: Call[None]) -> list[tuple[str, str]]:
    """Return salt prefixes and names of the tenants that the caller may see."""
    mine, isolation = call.tenant, call.context.engine.isolation
    sees_all = mine.admin or not mine.name
    names = call.context.keyring.tenants if sees_all else {mine.name}
    return [(isolation.owner(name), name) for name in sorted(names)]


def _bytes_per_token(call: Call[None]) -> float:
    """Return the bytes of KV per token in device memory; 0 if unknown."""
    facts = call.context.engine.facts
    held = float(facts.extra.get("kv_bytes") or 0)
    return held / facts.max_total_tokens if facts.max_total_tokens else 0.0


async def _text(call: Call[None], ids: list[int]) -> str:
    return await call.context.engine.detokenize(ids, skip_special_tokens=False)
