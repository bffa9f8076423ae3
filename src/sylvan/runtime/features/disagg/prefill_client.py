"""Asks a prefill server over HTTP to prefill again, as gateways do."""

from __future__ import annotations

from sylvan.runtime.features.disagg.channel import ChannelError
from sylvan.runtime.features.disagg.work import PrefillAgain


class PrefillClient:
    """Knows the HTTP ports of prefill servers, by bootstrap address.

    Args:
        api_key: Key of these servers; empty: they need none.
        timeout_s: Timeout of one call, which includes computing the prompt.
    """

    def __init__(self, api_key: str = "", timeout_s: float = 120.0) -> None:
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        self._ports: dict[tuple[str, int], int] = {}

    def learn(self, host: str, port: int, port_text: bytes) -> None:
        """Record the HTTP port that a prefill server announced."""
        if port_text.isdigit():
            self._ports[host, port] = int(port_text)

    async def ask(self, work: PrefillAgain) -> None:
        """Have tokens prefilled.

        Raises:
            ChannelError: The server is unreachable or refuses.
        """
        import httpx  # only requests that were retracted get here

        found = self._ports.get((work.host, work.port))
        if found is None:
            raise ChannelError("the prefill server did not say where it is asked over HTTP")
        body = {
            "input_ids": work.ids.tolist(),
            "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
            "bootstrap_host": work.host,
            "bootstrap_port": work.port,
            "bootstrap_room": work.room,
        }
        url = f"http://{work.host}:{found}/generate"
        try:
            async with httpx.AsyncClient(timeout=self._timeout_s, trust_env=False) as client:
                reply = await client.post(url, json=body, headers=self._headers)
        except httpx.HTTPError as error:
            raise ChannelError(f"{url} cannot be asked again: {error}") from None
        if reply.status_code != 200:
            raise ChannelError(f"{url} answered {reply.status_code} when it was asked again")
