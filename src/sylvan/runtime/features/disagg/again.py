"""Asks a prefill server once more, over HTTP, as gateways do."""

from __future__ import annotations

from sylvan.runtime.features.disagg.channel import ChannelError
from sylvan.runtime.features.disagg.data import AskAgain


class PrefillClient:
    """Knows the HTTP ports of prefill servers, by where decode servers are let in.

    Args:
        api_key: Of these servers; empty: they need none.
        timeout_s: Of one call, which takes as long as the prompt.
    """

    def __init__(self, api_key: str = "", timeout_s: float = 120.0) -> None:
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout_s = timeout_s
        self._ports: dict[tuple[str, int], int] = {}

    def learn(self, host: str, port: int, told: bytes) -> None:
        """A prefill server has said where it is asked."""
        if told.isdigit():
            self._ports[host, port] = int(told)

    async def ask(self, work: AskAgain) -> None:
        """Have tokens computed.

        Raises:
            ChannelError: the server cannot be asked, or refuses.
        """
        import httpx  # where requests are retracted only

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
