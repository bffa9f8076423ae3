"""Bodies of embeddings, scores, rankings and classes."""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from sylvan.api.media import media_part
from sylvan.api.native import TokenIds
from sylvan.api.request_fields import Name, Priority, Rid
from sylvan.api.validation import WireModel
from sylvan.protocol.errors import RequestError
from sylvan.protocol.media import MediaKind

MAX_INPUTS, MAX_ITEMS = 2048, 64

Inputs = (
    str
    | Annotated[list[str], Field(max_length=MAX_INPUTS)]
    | TokenIds
    | Annotated[list[TokenIds], Field(max_length=MAX_INPUTS)]
)


Item = Annotated[str, Field(min_length=1)]
Items = Item | Annotated[list[Item], Field(max_length=MAX_ITEMS)]


class MediaInput(WireModel):
    """A text, images, videos and sounds that are embedded as one.

    An item is an address, a data URL or base64. The chat template of the model says where its
    placeholders stand.
    """

    text: str | None = None
    image: Items | None = None
    video: Items | None = None
    audio: Items | None = None
    instruct: str | None = None
    """Instruction for the embedding; becomes the system message."""

    def messages(self, path: str) -> list[dict[str, Any]]:
        """Return the conversation to embed; see `sylvan.api.media`.

        Raises:
            RequestError: There is nothing in it, or an item is neither an address nor base64.
        """
        parts: list[dict[str, Any]] = []
        fields: dict[MediaKind, Any] = {
            "image": self.image,
            "video": self.video,
            "audio": self.audio,
        }
        for kind, given in fields.items():
            if isinstance(given, str):
                parts.append(media_part(kind, given, f"{path}.{kind}"))
                continue
            for i, item in enumerate(given or ()):
                parts.append(media_part(kind, item, f"{path}.{kind}[{i}]"))
        if self.text:
            parts.append({"type": "text", "text": self.text})
        if not parts:
            raise RequestError(f"{path}: a text, image, video or audio is needed.", param=path)
        system = [{"role": "system", "content": self.instruct}] if self.instruct else []
        return [*system, {"role": "user", "content": parts}]


class EmbeddingsBody(WireModel):
    """Texts and media to embed."""

    input: Inputs | MediaInput | Annotated[list[str | MediaInput], Field(max_length=MAX_INPUTS)]
    model: Name | None = None
    encoding_format: Literal["float", "base64", "sparse"] | None = None
    """`sparse`: `indices` and `values` of the numbers that are not 0, or of the words' weights."""
    return_multivector: bool | None = False
    """A vector of each token, for late interaction, instead of one of the text."""
    late_chunking: bool | None = False
    """The texts are the chunks of one document, and tokens see all of it."""
    dimensions: Annotated[int, Field(ge=1)] | None = None
    prompt_name: Name | None = None
    """Which of the model's prompts precedes every text; default: the model's default."""
    rid: Rid | None = None
    priority: Priority | None = None
    lora_path: Name | None = None


class EmbeddingsReply(BaseModel):
    """One embedding per text."""

    object: Literal["list"]
    data: list[dict[str, Any]]
    model: str
    usage: dict[str, Any]


class ClassifyBody(WireModel):
    """Texts to classify."""

    input: Inputs
    model: Name | None = None
    rid: Rid | None = None
    priority: Priority | None = None


class ClassifyReply(BaseModel):
    """One class per text."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[dict[str, Any]]
    usage: dict[str, Any]


class RerankBody(WireModel):
    """Documents to rank for a query: texts, and media for models that embed them."""

    query: str | MediaInput
    documents: Annotated[list[str | MediaInput], Field(min_length=1, max_length=MAX_INPUTS)]
    instruct: str | None = None
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool | None = True
    late_interaction: bool | None = None
    """Compare vectors of all tokens, of embedders; default: whether the model was trained so."""
    model: Name | None = None


class ScoreBody(WireModel):
    """Items to score after a query."""

    query: str | TokenIds | None = None
    items: (
        str
        | Annotated[list[str], Field(min_length=1, max_length=MAX_INPUTS)]
        | Annotated[list[TokenIds], Field(min_length=1, max_length=MAX_INPUTS)]
        | None
    ) = None
    label_token_ids: Annotated[TokenIds, Field(max_length=1024)] | list[TokenIds] | None = None
    """Token IDs whose probability after query and item is returned."""
    apply_softmax: bool | None = False
    item_first: bool | None = False
    """Put the item before the query."""
    temperature: Annotated[float, Field(gt=0, le=1e6)] | None = 1.0
    return_token_logprobs: bool | None = False
    model: Name | None = None


class ScoreReply(BaseModel):
    """Scores of every item, in the order of the labels."""

    scores: list[list[float]]
    token_logprobs: list[list[float]] | None = None
    model: str
    usage: dict[str, Any]
    object: Literal["scoring"]


class EncodeBody(WireModel):
    """Texts for `/encode` and `/classify`."""

    text: (
        str
        | Annotated[list[str], Field(max_length=MAX_INPUTS)]
        | Annotated[list[list[str]], Field(max_length=MAX_INPUTS)]
        | None
    ) = None
    input_ids: TokenIds | Annotated[list[TokenIds], Field(max_length=MAX_INPUTS)] | None = None
    rid: Rid | list[Rid] | None = None
    return_multivector: bool | None = False
    """A vector of each token, for late interaction, instead of one of the text."""
    is_cross_encoder_request: bool | None = False
    """Accepted; the model determines it."""
    dimensions: Annotated[int, Field(ge=1)] | None = None
    prompt_name: Name | None = None
    """Which of the model's prompts precedes every text; default: the model's default."""
    lora_path: Name | None = None
    priority: Priority | None = None
    return_prompt_token_ids: bool | None = False

    @property
    def without_effect(self) -> Collection[str]:
        return ("is_cross_encoder_request",)
