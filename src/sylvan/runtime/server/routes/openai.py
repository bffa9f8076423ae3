"""Routes of the OpenAI API."""

from __future__ import annotations

from sylvan.api.client_fields import TOOL_SCHEMA
from sylvan.api.errors import Family
from sylvan.api.openai.audio import TranscriptionReply
from sylvan.api.openai.batches import (
    BatchBody,
    BatchReply,
    DeletedReply,
    FileReply,
    ListQuery,
    ListReply,
)
from sylvan.api.openai.chat import ChatBody, ChatReply, RenderReply
from sylvan.api.openai.completions import CompletionBody, CompletionReply
from sylvan.api.openai.conversations import (
    ConversationBody,
    ConversationChange,
    ConversationDeleted,
    ConversationReply,
    ItemsBody,
)
from sylvan.api.openai.models import ModelCard, ModelList
from sylvan.api.openai.responses import (
    InputItemsQuery,
    InputItemsReply,
    InputTokensReply,
    ResponsesBody,
    ResponsesReply,
)
from sylvan.api.openai.vectors import (
    ClassifyBody,
    ClassifyReply,
    EmbeddingsBody,
    EmbeddingsReply,
    RerankBody,
    ScoreBody,
    ScoreReply,
)
from sylvan.api.rerank import CohereRerankBody, CohereRerankReply, PlainRerankBody
from sylvan.runtime.server.batches import routes as batches
from sylvan.runtime.server.openai import audio, chat, completions, embeddings, models, rerank
from sylvan.runtime.server.responses import conversations, inputs
from sylvan.runtime.server.responses import create as responses
from sylvan.runtime.server.routes.build import GET, SSE, openai

_FIELD_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "top_logprobs_num": "top_logprobs",
}
_CHAT_FIELD_NAMES = {"text": "messages", "input_ids": "messages", **_FIELD_NAMES}
_PROMPT_FIELD_NAMES = {"text": "prompt", "input_ids": "prompt", **_FIELD_NAMES}
_TEXTS_FIELD_NAMES = {"text": "input", "input_ids": "input"}
_INPUT_FIELD_NAMES = {
    "text": "input",
    "input_ids": "input",
    "messages": "input",
    "max_new_tokens": "max_output_tokens",
    TOOL_SCHEMA: ".parameters",
}

_RESPONSES = (
    openai(
        "/v1/responses",
        handler=responses.create,
        family=Family.RESPONSES,
        body=ResponsesBody,
        reply=ResponsesReply,
        stream=SSE,
        statuses=(404,),
        budgeted=True,
        field_names=_INPUT_FIELD_NAMES,
    ),
    openai(
        "/v1/responses/{response_id}",
        handler=responses.retrieve,
        family=Family.RESPONSES,
        methods=GET,
        reply=ResponsesReply,
        statuses=(400, 404),
    ),
    openai(
        "/v1/responses/{response_id}",
        handler=responses.delete,
        family=Family.RESPONSES,
        methods=("DELETE",),
        statuses=(400, 404),
    ),
    openai(
        "/v1/responses/{response_id}/input_items",
        handler=inputs.input_items,
        family=Family.RESPONSES,
        methods=GET,
        query=InputItemsQuery,
        reply=InputItemsReply,
        statuses=(404,),
    ),
    openai(
        "/v1/responses/input_tokens",
        handler=inputs.input_tokens,
        family=Family.RESPONSES,
        body=ResponsesBody,
        reply=InputTokensReply,
        statuses=(404,),
        field_names=_INPUT_FIELD_NAMES,
    ),
    openai(
        "/v1/responses/{response_id}/cancel",
        handler=responses.cancel,
        family=Family.RESPONSES,
        reply=ResponsesReply,
        statuses=(400, 404),
    ),
)

_CONVERSATIONS = (
    openai(
        "/v1/conversations",
        handler=conversations.create,
        family=Family.RESPONSES,
        body=ConversationBody,
        body_optional=True,
        reply=ConversationReply,
        budgeted=True,
    ),
    openai(
        "/v1/conversations/{conversation_id}",
        handler=conversations.retrieve,
        family=Family.RESPONSES,
        methods=GET,
        reply=ConversationReply,
        statuses=(400, 404),
    ),
    openai(
        "/v1/conversations/{conversation_id}",
        handler=conversations.change,
        family=Family.RESPONSES,
        body=ConversationChange,
        reply=ConversationReply,
        statuses=(404,),
    ),
    openai(
        "/v1/conversations/{conversation_id}",
        handler=conversations.delete,
        family=Family.RESPONSES,
        methods=("DELETE",),
        reply=ConversationDeleted,
        statuses=(400, 404),
    ),
    openai(
        "/v1/conversations/{conversation_id}/items",
        handler=conversations.list_items,
        family=Family.RESPONSES,
        methods=GET,
        query=InputItemsQuery,
        reply=InputItemsReply,
        statuses=(400, 404),
    ),
    openai(
        "/v1/conversations/{conversation_id}/items",
        handler=conversations.add_items,
        family=Family.RESPONSES,
        body=ItemsBody,
        reply=InputItemsReply,
        statuses=(404,),
        budgeted=True,
    ),
    openai(
        "/v1/conversations/{conversation_id}/items/{item_id}",
        handler=conversations.retrieve_item,
        family=Family.RESPONSES,
        methods=GET,
        statuses=(400, 404),
    ),
    openai(
        "/v1/conversations/{conversation_id}/items/{item_id}",
        handler=conversations.delete_item,
        family=Family.RESPONSES,
        methods=("DELETE",),
        reply=ConversationReply,
        statuses=(400, 404),
    ),
)

_FILES = (
    openai(
        "/v1/files",
        handler=batches.upload,
        typed=False,
        reply=FileReply,
        form=True,
        budgeted=True,
        statuses=(400, 413),
    ),
    openai("/v1/files", handler=batches.list_files, methods=GET, query=ListQuery, reply=ListReply),
    openai(
        "/v1/files/{file_id}",
        handler=batches.retrieve_file,
        methods=GET,
        reply=FileReply,
        statuses=(404,),
    ),
    openai(
        "/v1/files/{file_id}",
        handler=batches.delete_file,
        methods=("DELETE",),
        reply=DeletedReply,
        statuses=(404,),
    ),
    openai(
        "/v1/files/{file_id}/content",
        handler=batches.file_content,
        methods=GET,
        media_type="application/octet-stream",
        statuses=(404,),
    ),
)

_AUDIO = tuple(
    openai(
        f"/v1/audio/{path}",
        handler=handler,
        typed=False,
        reply=TranscriptionReply,
        stream=SSE,
        form=True,
        budgeted=True,
        statuses=(400, 413),
    )
    for path, handler in (
        ("transcriptions", audio.transcriptions),
        ("translations", audio.translations),
    )
)

_BATCHES = (
    openai("/v1/batches", handler=batches.create, body=BatchBody, reply=BatchReply, budgeted=True),
    openai(
        "/v1/batches", handler=batches.list_batches, methods=GET, query=ListQuery, reply=ListReply
    ),
    openai(
        "/v1/batches/{batch_id}",
        handler=batches.retrieve,
        methods=GET,
        reply=BatchReply,
        statuses=(404,),
    ),
    openai(
        "/v1/batches/{batch_id}",
        handler=batches.delete,
        methods=("DELETE",),
        reply=DeletedReply,
        statuses=(404, 409),
    ),
    openai(
        "/v1/batches/{batch_id}/cancel",
        handler=batches.cancel,
        reply=BatchReply,
        statuses=(404,),
    ),
)

OPENAI = (
    openai(
        "/v1/chat/completions",
        handler=chat.chat,
        body=ChatBody,
        reply=ChatReply,
        stream=SSE,
        budgeted=True,
        field_names=_CHAT_FIELD_NAMES,
    ),
    openai(
        "/v1/completions",
        handler=completions.completions,
        body=CompletionBody,
        reply=CompletionReply,
        stream=SSE,
        budgeted=True,
        field_names=_PROMPT_FIELD_NAMES,
    ),
    *_RESPONSES,
    *_CONVERSATIONS,
    openai("/v1/models", handler=models.models, methods=GET, reply=ModelList),
    openai(
        "/v1/models/{model:path}",
        handler=models.model,
        methods=GET,
        family=Family.RESPONSES,
        reply=ModelCard,
        statuses=(404,),
    ),
    openai("/v1/chat/render", handler=chat.render_chat, body=ChatBody, reply=RenderReply),
    openai(
        "/v1/embeddings",
        handler=embeddings.embeddings,
        body=EmbeddingsBody,
        reply=EmbeddingsReply,
        budgeted=True,
        field_names=_TEXTS_FIELD_NAMES,
    ),
    openai(
        "/v1/classify",
        handler=embeddings.classify,
        body=ClassifyBody,
        reply=ClassifyReply,
        field_names=_TEXTS_FIELD_NAMES,
        budgeted=True,
    ),
    openai(
        "/v1/score",
        handler=embeddings.score,
        body=ScoreBody,
        reply=ScoreReply,
        budgeted=True,
        field_names={"token_ids_logprob": "label_token_ids", "input_ids": "items"},
    ),
    openai(
        "/v1/rerank",
        handler=embeddings.rerank,
        methods=("POST", "PUT"),
        body=RerankBody,
        budgeted=True,
    ),
    openai(
        "/v2/rerank",
        handler=rerank.cohere,
        body=CohereRerankBody,
        reply=CohereRerankReply,
        budgeted=True,
    ),
    openai("/rerank", handler=rerank.plain, body=PlainRerankBody, budgeted=True),
    *_FILES,
    *_AUDIO,
    *_BATCHES,
    # SageMaker
    openai(
        "/invocations",
        handler=chat.chat,
        body=ChatBody,
        reply=ChatReply,
        stream=SSE,
        typed=False,
        budgeted=True,
        tag="Cloud",
        field_names=_CHAT_FIELD_NAMES,
    ),
)
