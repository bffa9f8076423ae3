"""`/v1/score`: how likely labels are after a query and an item."""

from __future__ import annotations

import math
from typing import Any

from starlette.responses import Response

from sylvan.api.openai.vectors import ScoreBody
from sylvan.protocol.errors import RequestError
from sylvan.protocol.requests import LogprobOptions
from sylvan.protocol.sampling import SamplingParams
from sylvan.runtime.server.endpoint import Call, json_response
from sylvan.runtime.server.samples import collect
from sylvan.runtime.server.streaming import unless_gone
from sylvan.runtime.tokenizer.types import GenerateInput


async def score(call: Call[ScoreBody]) -> Response:
    """The probability of each label, for every item."""
    body, context = call.body, call.context
    prompts = await _prompts(call)
    labels = _labels(body, len(prompts))
    sampling = SamplingParams(max_new_tokens=1, temperature=body.temperature or 1.0)
    inputs = [
        GenerateInput(
            input_ids=ids,
            sampling=sampling,
            stream=False,
            logprobs=LogprobOptions(token_ids=tuple(wanted)),
            tenant=call.tenant.name,
        )
        for ids, wanted in zip(prompts, labels, strict=True)
    ]
    results = await unless_gone(call.request, collect(context.engine, inputs))
    logprobs: list[list[float]] = []
    for [sample] in results:
        chosen = sample.logprobs[0].chosen_logprobs
        assert chosen is not None, "label ids were asked for"
        logprobs.append(chosen[0].tolist())
    tokens = sum(sample.usage.prompt_tokens for [sample] in results)
    for [sample] in results:
        assert sample.finish is not None, "a collected sample is finished"
        context.accounts.finished(call.tenant, sample.usage, sample.finish, sample.timing)
    reply: dict[str, Any] = {
        "scores": [_scores(row, softmax=bool(body.apply_softmax)) for row in logprobs],
        "model": body.model or context.settings.served_model_name,
        "usage": {"prompt_tokens": tokens, "completion_tokens": 0, "total_tokens": tokens},
        "object": "scoring",
    }
    if body.return_token_logprobs:
        reply["token_logprobs"] = logprobs
    return json_response(reply)


def _scores(row: list[float], *, softmax: bool) -> list[float]:
    values = [math.exp(value) for value in row]
    total = sum(values)
    return [value / total for value in values] if softmax and total else values


def _labels(body: ScoreBody, num_items: int) -> list[list[int]]:
    ids: Any = body.label_token_ids
    if not ids:
        message = "label_token_ids must be given: this model generates text."
        raise RequestError(message, param="label_token_ids")
    if isinstance(ids[0], int):
        return [ids] * num_items
    if len(ids) != num_items or not all(ids):
        message = f"label_token_ids: one list of ids for each of the {num_items} items."
        raise RequestError(message, param="label_token_ids")
    return ids


async def _prompts(call: Call[ScoreBody]) -> list[list[int]]:
    body, engine = call.body, call.context.engine
    items: Any = [body.items] if isinstance(body.items, str) else body.items
    if not items:
        raise RequestError("items must be given.", param="items")
    if body.query is None:
        raise RequestError("query must be given.", param="query")
    if isinstance(body.query, str) != isinstance(items[0], str):
        message = "items: query and items must both be text, or both be token ids."
        raise RequestError(message, param="items")
    prompts: list[list[int]] = []
    for item in items:
        query: Any = body.query
        joined: Any = item + query if body.item_first else query + item
        prompts.append(await engine.tokenize(joined) if isinstance(joined, str) else joined)
    return prompts
