"""An engine in this process."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

from sylvan.lang.backends._native import Body, NativeBackend
from sylvan.lang.cancel import CancelScope
from sylvan.lang.chat_templates import get_chat_template, get_chat_template_by_model_path


class EngineBackend(NativeBackend):
    """A `sylvan.Engine`, or any object with its `generate`.

    Args:
        engine: `generate(prompt=..., sampling_params=..., stream=..., rid=...)` must be
          thread-safe, and return an object, a list, or with `stream` an iterator of chunks;
          `abort_request(rid)` aborts it.
        chat_template_name: Template of the language's registry; default: by the model's path.
    """

    def __init__(self, engine: Any, chat_template_name: str | None = None) -> None:
        super().__init__()
        self._engine = engine
        self.chat_template = (
            get_chat_template(chat_template_name)
            if chat_template_name
            else get_chat_template_by_model_path(self.get_model_name())
        )

    def get_model_name(self) -> str:
        info = getattr(self._engine, "get_model_info", None)
        found = info() if callable(info) else {}
        path = found.get("model_path") if isinstance(found, dict) else None
        return str(path or "")

    def send(self, body: Body, scope: CancelScope | None = None) -> Any:
        if scope is None:
            return self._engine.generate(**_arguments(body))
        arguments, abort = self._abortable(body)
        with scope.on_cancel(abort):
            answer = self._engine.generate(**arguments)
        scope.check()
        return answer

    def send_stream(self, body: Body, scope: CancelScope) -> Iterator[Body]:
        arguments, abort = self._abortable(body)
        with scope.on_cancel(abort):
            for chunk in self._engine.generate(**arguments):
                scope.check()
                yield chunk

    def _abortable(self, body: Body) -> tuple[Body, Callable[[], None]]:
        """Arguments of `generate`, and a function that aborts the request."""
        rid = uuid.uuid4().hex
        arguments = {**_arguments(body), "rid": rid}

        def abort() -> None:
            self._engine.abort_request(rid)

        return arguments, abort

    def flush_cache(self) -> Any:
        return self._engine.flush_cache()

    def get_server_info(self) -> Any:
        return self._engine.get_server_info()

    def shutdown(self) -> None:
        """Stop the engine."""
        self._engine.shutdown()


def _arguments(body: Body) -> Body:
    """A request body as arguments of `generate`, which calls the text `prompt`."""
    arguments = dict(body)
    if "text" in arguments:
        arguments["prompt"] = arguments.pop("text")
    return arguments
