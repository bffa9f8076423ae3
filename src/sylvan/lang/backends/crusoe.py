"""Crusoe's managed inference: the OpenAI API at another address."""

from __future__ import annotations

from typing import Any

from sylvan.config.env import variable
from sylvan.lang.backends.openai import OpenAI
from sylvan.lang.chat_templates import MessageFormat

BASE_URL = "https://managed-inference-api-proxy.crusoecloud.com/v1/"


class Crusoe(OpenAI):
    """A model served by Crusoe.

    Args:
        model_name: The model, e.g. `meta-llama/Llama-3.1-8B-Instruct`.
        api_key: The key; from the environment's CRUSOE_API_KEY if not given.
        base_url: Another address.
        chat_template: How roles are spelt in the program's text.
        kwargs: For the SDK's client.

    Raises:
        ValueError: there is no key.
        MissingExtraError: the OpenAI SDK is not installed.
    """

    def __init__(
        self,
        model_name: str,
        api_key: str | None = None,
        base_url: str | None = None,
        chat_template: MessageFormat | None = None,
        **kwargs: Any,
    ) -> None:
        api_key = api_key or variable("CRUSOE_API_KEY")
        if not api_key:
            raise ValueError("Crusoe needs an API key: pass api_key= or set CRUSOE_API_KEY")
        super().__init__(
            model_name,
            chat_template=chat_template,
            api_key=api_key,
            base_url=base_url or BASE_URL,
            **kwargs,
        )
