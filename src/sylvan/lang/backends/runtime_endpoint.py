"""A Sylvan or SGLang server, over HTTP."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sylvan.lang.backends._http import HttpClient
from sylvan.lang.backends._native import Body, NativeBackend
from sylvan.lang.cancel import CancelScope
from sylvan.lang.chat_templates import get_chat_template, get_chat_template_by_model_path


class RuntimeEndpoint(NativeBackend):
    """A running server.

    Args:
        base_url: Its address, such as `http://127.0.0.1:30000`.
        api_key: The server's API key, if it needs one.
        verify: File of certificates to trust.
        chat_template_name: Template of the language's registry; by the model's path if not given.
        timeout: Seconds without data after which a call fails; None waits forever.

    Raises:
        BackendError: the server is unreachable.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        verify: str | None = None,
        chat_template_name: str | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__()
        self.base_url = base_url.rstrip("/")
        self._http = HttpClient(base_url, api_key=api_key, verify=verify, timeout_s=timeout)
        self.model_info: dict[str, Any] = self._http.call("GET", "/get_model_info")
        self.chat_template = (
            get_chat_template(chat_template_name)
            if chat_template_name
            else get_chat_template_by_model_path(self.get_model_name())
        )

    def get_model_name(self) -> str:
        return self.model_info["model_path"]

    def send(self, body: Body, scope: CancelScope | None = None) -> Any:
        return self._http.call("POST", "/generate", body, scope)

    def send_stream(self, body: Body, scope: CancelScope) -> Iterator[Body]:
        return self._http.stream("POST", "/generate", body, scope)

    def concatenate_and_append(self, src_rids: Sequence[str], dst_rid: str) -> None:
        """Not supported by current servers."""
        body = {"src_rids": list(src_rids), "dst_rid": dst_rid}
        self._http.call("POST", "/concate_and_append_request", body)

    def flush_cache(self) -> None:
        self._http.call("POST", "/flush_cache")

    def get_server_info(self) -> Any:
        return self._http.call("GET", "/server_info")

    def start_profile(self) -> None:
        """Start a profile on the server."""
        self._http.call("GET", "/start_profile")

    def stop_profile(self) -> None:
        """Stop the profile; the server writes it."""
        self._http.call("GET", "/stop_profile")

    def shutdown(self) -> None:
        """Close connections; the server keeps running."""
        self._http.close()
