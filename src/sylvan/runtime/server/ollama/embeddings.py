"""`/api/embed` and its older form, `/api/embeddings`."""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from sylvan.api.ollama import OllamaEmbedBody, OllamaEmbeddingsBody
from sylvan.protocol.errors import RequestError
from sylvan.runtime.server.endpoint import Call, json_response
from sylvan.runtime.server.ollama.options import check_options
from sylvan.runtime.server.openai.embeddings import caller_of
from sylvan.runtime.server.streaming import cancel_on_disconnect
from sylvan.runtime.serving.prompts import read_prompts
from sylvan.runtime.tokenizer.types import EmbedInput, Vector


async def embed(call: Call[OllamaEmbedBody]) -> Response:
    """Embed texts."""
    body, context = call.body, call.context
    began = context.clock()
    texts = [body.input] if isinstance(body.input, str) else body.input
    if texts != [""] and not all(texts):
        raise RequestError("input has an empty text; a text needs a token.", param="input")
    cut = body.truncate is not False
    vectors = await _vectors(call, [text for text in texts if text], cut, body.dimensions)
    return json_response(
        {
            "model": body.model,
            "embeddings": [vector.values.tolist() for vector in vectors],
            "total_duration": int((context.clock() - began) * 1e9),
            "load_duration": 0,
            "prompt_eval_count": sum(vector.usage.prompt_tokens for vector in vectors),
        }
    )


async def embeddings(call: Call[OllamaEmbeddingsBody]) -> Response:
    """Embed a text; an empty text only asks to load the model, which is loaded."""
    vectors = await _vectors(call, [call.body.prompt] if call.body.prompt else [], True, None)
    return json_response({"embedding": vectors[0].values.tolist() if vectors else []})


async def _vectors(
    call: Call[Any], texts: list[str], cut: bool, dimensions: int | None
) -> list[Vector]:
    call.ignored.extend(check_options(call.body.options))
    caller = caller_of(call)
    caller.require_task("embed", "both", what="embeddings")
    prompts = read_prompts(caller.facts.model_path)
    inputs = [
        EmbedInput(text=prompts.apply(text), dimensions=dimensions, truncate=cut) for text in texts
    ]
    return await cancel_on_disconnect(call.request, caller.vectors(inputs))
