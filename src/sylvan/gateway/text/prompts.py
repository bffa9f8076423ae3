"""Token IDs of prompts for text workers, for policies that use exact block hashes."""

from __future__ import annotations

from collections.abc import Sequence

from sylvan.api.openai.chat import ChatBody
from sylvan.api.openai.chat_tools import tool_use
from sylvan.api.validation import parse
from sylvan.gateway.http.parsed_body import ParsedBody
from sylvan.gateway.text.chat import template_request
from sylvan.gateway.text.library import TextLibrary
from sylvan.gateway.text.model import ModelText
from sylvan.gateway.workers.registry import Registry
from sylvan.gateway.workers.worker import Worker
from sylvan.protocol.errors import RequestError
from sylvan.utils.threads import call_in_thread

_TEXTS = {"/generate": "text", "/v1/completions": "prompt"}


class PromptIds:
    """Tokenises prompts as a worker would, to find their cached blocks; the worker still gets text.

    Args:
        registry: All workers.
        library: Text processing of their models.
    """

    def __init__(self, registry: Registry, library: TextLibrary) -> None:
        self._registry = registry
        self._library = library

    async def of(self, path: str, parsed: ParsedBody) -> Sequence[int] | None:
        """Return the IDs of a request's only prompt; None if they are unknown now.

        Raises:
            UnknownModelError: No worker serves the model, while several models are served.
        """
        worker = self._worker(parsed.model)
        text = self._library.get_loaded(worker) if worker is not None else None
        if text is None:
            return None
        if path == "/v1/chat/completions":
            return await _conversation(text, parsed)
        prompt = parsed.fields.get(_TEXTS.get(path, ""))
        return await text.ids.of(prompt) if isinstance(prompt, str) and prompt else None

    def _worker(self, model: str | None) -> Worker | None:
        known = self._registry.known_model(model)
        for worker in self._registry.workers:
            if known is None or known in worker.models:
                return worker
        return None


async def _conversation(text: ModelText, parsed: ParsedBody) -> Sequence[int] | None:
    try:
        body = parse(ChatBody, parsed.fields)
        request = template_request(body, tool_use(body))
        return (await call_in_thread(text.template.render, request)).input_ids
    except RequestError:  # the worker will report the error
        return None
