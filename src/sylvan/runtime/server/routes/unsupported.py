"""SGLang routes whose features are missing here: each answers 501 and says what is missing.

Callers are authenticated as for a working route. The body has the native error format with, for
trainers and tools that read them, `success` and `message`.
"""

from __future__ import annotations

from typing import Any

from starlette.responses import Response

from sylvan.api.errors import Family, error_body
from sylvan.runtime.server.endpoint import Call, Endpoint, json_response
from sylvan.runtime.server.routes.build import GET, GET_POST
from sylvan.runtime.server.security import Level

POST = ("POST",)

_NO_SENDING = "A server does not send its weights to others; start them with the same checkpoint."
_NO_SLOWDOWN = "This server cannot be slowed down on purpose."
_EXPERTS = "Rows of experts are always counted: see expert_load in /server_info."
_SETTINGS = "Use /config to change settings while the server runs."
_ELASTIC = "A server has one replica of fixed size; start more of them to scale."
_WHOLE_AUDIO = "Audio is not streamed in: use /v1/audio/transcriptions, or audio parts of messages."
_DECISIONS = "There is no decision API; use /v1/chat/completions with a grammar, or /v1/score."

_TABLE: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    (
        _NO_SENDING,
        POST,
        ("/init_weights_send_group_for_remote_instance", "/send_weights_to_remote_instance"),
    ),
    (
        _NO_SENDING,
        GET,
        ("/remote_instance_transfer_engine_info", "/get_remote_instance_transfer_engine_info"),
    ),
    (_NO_SLOWDOWN, GET_POST, ("/slow_down",)),
    (
        _EXPERTS,
        GET_POST,
        (
            "/start_expert_distribution_record",
            "/stop_expert_distribution_record",
            "/dump_expert_distribution_record",
        ),
    ),
    (_SETTINGS, ("POST", "PUT"), ("/set_internal_state",)),
    (_ELASTIC, POST, ("/scale_elastic_ep",)),
    (_ELASTIC, GET, ("/is_scaling_elastic_ep",)),
)


def _unsupported(
    path: str, missing_feature: str, methods: tuple[str, ...], **fields: Any
) -> Endpoint:
    family: Family = fields.pop("family", Family.NATIVE)

    async def answer(call: Call[None]) -> Response:
        content = error_body(family, 501, missing_feature)
        return json_response({**content, "success": False, "message": missing_feature}, status=501)

    return Endpoint(
        **{
            "path": path,
            "handler": answer,
            "methods": methods,
            "family": family,
            "level": Level.ADMIN_OPTIONAL,
            "tag": "Not here yet",
            "statuses": (501,),
            "summary": "Not here yet.",
            "missing_feature": missing_feature,
            **fields,
        }
    )


UNSUPPORTED = (
    *(
        _unsupported(path, missing_feature, methods)
        for missing_feature, methods, paths in _TABLE
        for path in paths
    ),
    *(
        _unsupported(path, missing_feature, methods, level=Level.NORMAL, family=Family.OPENAI)
        for path, missing_feature, methods in (
            ("/v1/realtime", _WHOLE_AUDIO, GET),
            ("/v1/decisions", _DECISIONS, POST),
            ("/v1/systemone", _DECISIONS, POST),
        )
    ),
)
