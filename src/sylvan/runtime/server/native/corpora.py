"""Routes for corpora of speculative decoding."""

from __future__ import annotations

import uuid
from typing import Any

from starlette.responses import Response

from sylvan.api.corpora import AddCorpusBody, RemoveCorpusBody
from sylvan.protocol.errors import RequestError
from sylvan.protocol.messages import AddCorpus, CorpusCommand, ListCorpora, RemoveCorpus
from sylvan.runtime.server.context import Context
from sylvan.runtime.server.endpoint import Call, json_response


async def add_external_corpus(call: Call[AddCorpusBody]) -> Response:
    """Add a corpus to draft from."""
    body, facts = call.body, call.context.engine.facts
    if body.file_path is not None:
        raise RequestError(
            "file_path: no files are read for clients; send documents, or set speculative.corpus"
            " when the server starts",
            param="file_path",
        )
    if (body.documents is None) == (body.token_chunks is None):
        raise RequestError("give either documents or token_chunks", param="documents")
    if body.token_chunks is not None:
        texts = tuple(map(tuple, body.token_chunks))
        if any(not 0 <= token < facts.vocab_size for text in texts for token in text):
            raise RequestError(
                f"token_chunks: ids must be in 0..{facts.vocab_size - 1}", param="token_chunks"
            )
    else:
        encode = call.context.engine.tokenizer.encode
        texts = tuple(tuple(encode(text)) for text in body.documents or ())
    name = body.corpus_id or uuid.uuid4().hex
    found = await _control(call.context, AddCorpus(id=name, texts=texts))
    return json_response({"success": True, "message": "The corpus is loaded.", **found})


async def remove_external_corpus(call: Call[RemoveCorpusBody]) -> Response:
    """Remove a corpus; 404 if there is none of that name."""
    name = call.body.corpus_id
    await _control(call.context, RemoveCorpus(id=name))
    return json_response({"success": True, "corpus_id": name, "message": "The corpus is removed."})


async def list_external_corpora(call: Call[None]) -> Response:
    """List the corpora with their token counts."""
    found = await _control(call.context, ListCorpora())
    counts: dict[str, int] = found["corpus_token_counts"]
    reply = {"success": True, "corpus_ids": sorted(counts), "corpus_token_counts": counts}
    return json_response({**reply, "message": ""})


async def _control(context: Context, command: CorpusCommand) -> dict[str, Any]:
    reply = await context.engine.control(command)
    if not reply.ok:
        raise RequestError(reply.message, status=reply.status)
    return dict(reply.body or {})
