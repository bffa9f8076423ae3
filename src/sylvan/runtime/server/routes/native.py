"""Native routes: generation, tokens, health, information, control, pages."""

from __future__ import annotations

from sylvan.api.adapters import (
    AdapterReply,
    LoadAdapterBody,
    SentAdapterBody,
    UnloadAdapterBody,
)
from sylvan.api.cache import CurveQuery, ExplainQuery, TreeQuery
from sylvan.api.client_fields import grammars_in
from sylvan.api.corpora import AddCorpusBody, CorporaReply, CorpusReply, RemoveCorpusBody
from sylvan.api.errors import Family
from sylvan.api.live import DryRunQuery, RevertBody, SettingsBody
from sylvan.api.native import (
    AbortBody,
    CloseSessionBody,
    ContinueBody,
    ControlReplyBody,
    FlushQuery,
    GenerateBody,
    GenerateReplies,
    LoadsQuery,
    OpenSessionBody,
    PauseBody,
    RecentQuery,
    RoleBody,
)
from sylvan.api.observe import LoggingBody, ProfileBody, StepsQuery, TraceLevelQuery, TracesQuery
from sylvan.api.openai.vectors import EncodeBody
from sylvan.api.tiers import StoreBody
from sylvan.api.tokens import DetokenizeBody, DetokenizeReply, TokenizeBody, TokenizeReply
from sylvan.api.tools import ParseCallsBody, ParseCallsReply, SeparateBody, SeparateReply
from sylvan.api.weights import (
    BalanceReply,
    BracketBody,
    CheckerBody,
    ChecksumReply,
    DiskBody,
    DistributedBody,
    GroupBody,
    LeaveBody,
    MemoryBody,
    MemoryReply,
    SocketBody,
    TensorBody,
    TensorQuery,
    UpdateReply,
    VersionBody,
)
from sylvan.runtime.server import pages
from sylvan.runtime.server.endpoint import Endpoint
from sylvan.runtime.server.native import (
    adapters,
    cache,
    control,
    corpora,
    generate,
    health,
    info,
    observe,
    parse,
    sessions,
    settings,
    tiers,
    tokens,
    weights,
)
from sylvan.runtime.server.openai import embeddings
from sylvan.runtime.server.routes.build import GET, GET_POST, SSE, admin, aliases, opened, own
from sylvan.runtime.server.security import Level

_GENERATION = (
    Endpoint(
        path="/generate",
        handler=generate.generate,
        methods=("POST", "PUT"),
        body=GenerateBody,
        reply=GenerateReplies,
        stream=SSE,
        budgeted=True,
        field_names=grammars_in("sampling_params"),
    ),
    *aliases(
        Endpoint(
            path="/tokenize",
            handler=tokens.tokenize,
            body=TokenizeBody,
            reply=TokenizeReply,
            typed=True,
            family=Family.OPENAI,
        ),
        "/v1/tokenize",
    ),
    *aliases(
        Endpoint(
            path="/detokenize",
            handler=tokens.detokenize,
            body=DetokenizeBody,
            reply=DetokenizeReply,
            typed=True,
            family=Family.OPENAI,
        ),
        "/v1/detokenize",
    ),
    Endpoint(
        path="/encode",
        handler=embeddings.encode,
        methods=("POST", "PUT"),
        body=EncodeBody,
        budgeted=True,
    ),
    Endpoint(
        path="/classify",
        handler=embeddings.classify_natively,
        methods=("POST", "PUT"),
        body=EncodeBody,
        budgeted=True,
    ),
    Endpoint(
        path="/parse_function_call",
        handler=parse.parse_function_call,
        body=ParseCallsBody,
        reply=ParseCallsReply,
    ),
    Endpoint(
        path="/separate_reasoning",
        handler=parse.separate_reasoning,
        body=SeparateBody,
        reply=SeparateReply,
    ),
)

_HEALTH = (
    opened("/live", handler=health.live, media_type="", statuses=(503,), plain_statuses=(503,)),
    opened("/ready", handler=health.ready, media_type="", statuses=(503,), plain_statuses=(503,)),
    opened("/health", handler=health.health, media_type="", statuses=(503,), plain_statuses=(503,)),
    opened(
        "/health_generate",
        handler=health.health_generate,
        media_type="",
        statuses=(503,),
        plain_statuses=(503,),
    ),
)

_INFO = (
    *aliases(
        Endpoint(path="/model_info", handler=info.model_info, methods=("GET",), tag="Info"),
        "/get_model_info",
    ),
    *aliases(
        admin("/server_info", handler=info.server_info, methods=("GET",), statuses=(503,)),
        "/get_server_info",
    ),
    Endpoint(
        path="/v1/loads",
        handler=info.loads,
        methods=("GET",),
        query=LoadsQuery,
        stream="text/plain",
        tag="Info",
    ),
    own(
        "/requests",
        handler=info.requests,
        methods=GET,
        query=RecentQuery,
        tag="Info",
        budgeted=False,  # reads existing state
    ),
)

_SESSIONS = (
    Endpoint(
        path="/open_session",
        handler=sessions.open_session,
        methods=GET_POST,
        body=OpenSessionBody,
        body_optional=True,
        query=OpenSessionBody,
    ),
    Endpoint(
        path="/close_session",
        handler=sessions.close_session,
        methods=GET_POST,
        body=CloseSessionBody,
        body_optional=True,
        query=CloseSessionBody,
        media_type="",
    ),
)

_CACHE = (
    own("/cache/tree", handler=cache.cache_tree, methods=GET, query=TreeQuery, statuses=(404,)),
    own(
        "/cache/explain",
        handler=cache.cache_explain,
        methods=GET,
        query=ExplainQuery,
        statuses=(404,),
    ),
    admin(
        "/cache/curve", handler=cache.cache_curve, methods=GET, query=CurveQuery, statuses=(404,)
    ),
)

_STORES = (
    admin(
        "/hicache/storage-backend",
        handler=tiers.attach_store,
        methods=("PUT",),
        level=Level.ADMIN_FORCE,
        body=StoreBody,
        statuses=(503,),
    ),
    admin(
        "/hicache/storage-backend", handler=tiers.detach_store, methods=("DELETE",), statuses=(400,)
    ),
    admin("/hicache/storage-backend", handler=tiers.describe_store, methods=GET, statuses=(400,)),
    admin(
        "/hicache/storage-backend/clear",
        handler=tiers.clear_store,
        media_type="text/plain",
        statuses=(400, 503),
    ),
    admin("/get_hicache_l3_cache_layout", handler=tiers.store_layout, methods=GET, statuses=(400,)),
)

_METRICS = (
    opened("/metrics", handler=info.metrics, media_type="text/plain", statuses=(404,), tag="Info"),
)

_OBSERVE = (
    own("/trace", handler=observe.traces, methods=GET, query=TracesQuery, tag="Observe"),
    admin(
        "/trace/steps", handler=observe.trace_steps, methods=GET, query=StepsQuery, tag="Observe"
    ),
    own("/trace/{rid}", handler=observe.trace, methods=GET, statuses=(404,), tag="Observe"),
    admin(
        "/set_trace_level",
        handler=observe.set_trace_level,
        methods=GET_POST,
        query=TraceLevelQuery,
        media_type="text/plain",
        tag="Observe",
    ),
    admin("/config", handler=settings.show, methods=GET),
    admin(
        "/config",
        handler=settings.change,
        methods=("PATCH",),
        body=SettingsBody,
        query=DryRunQuery,
        statuses=(501,),
    ),
    admin("/config/reload", handler=settings.reload, query=DryRunQuery, statuses=(501,)),
    admin(
        "/config/revert",
        handler=settings.revert,
        body=RevertBody,
        query=DryRunQuery,
        statuses=(501,),
    ),
    admin(
        "/configure_logging",
        handler=observe.configure_logging,
        methods=GET_POST,
        body=LoggingBody,
        body_optional=True,
        tag="Observe",
    ),
    admin(
        "/start_profile",
        handler=observe.start_profile,
        methods=GET_POST,
        body=ProfileBody,
        body_optional=True,
        media_type="text/plain",
        statuses=(503,),
        tag="Observe",
    ),
    admin(
        "/stop_profile",
        handler=observe.stop_profile,
        methods=GET_POST,
        media_type="text/plain",
        statuses=(503,),
        tag="Observe",
    ),
)

_CONTROL = (
    Endpoint(
        path="/abort_request",
        handler=control.abort_request,
        body=AbortBody,
        media_type="",
        tag="Control",
    ),
    admin(
        "/flush_cache",
        handler=control.flush_cache,
        methods=GET_POST,
        query=FlushQuery,
        media_type="text/plain",
        statuses=(503,),
    ),
    admin(
        "/add_external_corpus",
        handler=corpora.add_external_corpus,
        body=AddCorpusBody,
        reply=CorpusReply,
        statuses=(503,),
    ),
    admin(
        "/remove_external_corpus",
        handler=corpora.remove_external_corpus,
        body=RemoveCorpusBody,
        reply=CorpusReply,
        statuses=(404, 503),
    ),
    admin(
        "/list_external_corpora",
        handler=corpora.list_external_corpora,
        methods=GET,
        reply=CorporaReply,
        statuses=(400, 503),
    ),
    admin(
        "/pd_role_switch",
        handler=control.switch_role,
        body=RoleBody,
        statuses=(400,),
    ),
    admin(
        "/freeze_gc",
        handler=control.freeze_gc,
        methods=GET_POST,
        media_type="text/plain",
    ),
    admin(
        "/pause_generation",
        handler=control.pause_generation,
        body=PauseBody,
        body_optional=True,
        reply=ControlReplyBody,
    ),
    admin(
        "/continue_generation",
        handler=control.continue_generation,
        body=ContinueBody,
        body_optional=True,
        reply=ControlReplyBody,
    ),
)

_ADAPTERS = tuple(
    admin(
        path,
        handler=handler,
        body=body,
        reply=AdapterReply,
        reply_on_failure=True,
        statuses=(503,),
        tag="Adapters",
    )
    for path, handler, body in (
        ("/load_lora_adapter", adapters.load, LoadAdapterBody),
        ("/v1/load_lora_adapter", adapters.load, LoadAdapterBody),
        ("/load_lora_adapter_from_tensors", adapters.load_sent, SentAdapterBody),
        ("/unload_lora_adapter", adapters.unload, UnloadAdapterBody),
        ("/v1/unload_lora_adapter", adapters.unload, UnloadAdapterBody),
    )
)

_WEIGHTS = (
    *(
        admin(
            path,
            handler=handler,
            body=body,
            reply=UpdateReply,
            reply_on_failure=True,
            statuses=(503,),
            tag="Weights",
        )
        for path, handler, body in (
            ("/update_weights_from_disk", weights.from_disk, DiskBody),
            ("/update_weights_from_tensor", weights.from_tensor, TensorBody),
            ("/update_weights_from_distributed", weights.from_distributed, DistributedBody),
            ("/update_weights_from_ipc", weights.from_ipc, SocketBody),
            ("/init_weights_update_group", weights.join_group, GroupBody),
            ("/update_weight_version", weights.set_version, VersionBody),
        )
    ),
    *(
        admin(
            path,
            handler=handler,
            body=body,
            body_optional=True,
            reply=UpdateReply,
            reply_on_failure=True,
            statuses=(503,),
            tag="Weights",
        )
        for path, handler, body in (
            ("/destroy_weights_update_group", weights.leave_group, LeaveBody),
            ("/begin_weight_update", weights.begin, BracketBody),
            ("/end_weight_update", weights.end, BracketBody),
        )
    ),
    *(
        admin(
            path,
            handler=handler,
            methods=GET_POST,
            body=body,
            body_optional=True,
            reply=reply,
            reply_on_failure=True,
            statuses=(503,),
            tag="Weights",
        )
        for path, handler, body, reply in (
            ("/weights_checker", weights.check, CheckerBody, ChecksumReply),
            ("/release_memory_occupation", weights.release_memory, MemoryBody, MemoryReply),
            ("/resume_memory_occupation", weights.resume_memory, MemoryBody, MemoryReply),
        )
    ),
    admin(
        "/balance_experts",
        handler=weights.balance_experts,
        reply=BalanceReply,
        reply_on_failure=True,
        statuses=(400, 503),
        tag="Weights",
    ),
    admin(
        "/get_weights_by_name",
        handler=weights.read_tensor,
        methods=GET_POST,
        body=TensorQuery,
        body_optional=True,
        query=TensorQuery,
        statuses=(503,),
        tag="Weights",
    ),
)

_PAGES = (
    Endpoint(
        path="/",
        handler=pages.home,
        methods=("GET", "HEAD"),
        level=Level.OPEN,
        media_type="text/plain",
        tag="Pages",
    ),
    opened("/ui", handler=pages.ui, media_type="text/html", tag="Pages"),
    opened(
        "/ui/{name:path}",
        handler=pages.ui_file,
        media_type="text/javascript",
        statuses=(404,),
        tag="Pages",
    ),
    opened("/docs", handler=pages.docs, media_type="text/html", tag="Pages"),
    opened("/docs/docs.js", handler=pages.docs_script, media_type="text/javascript", tag="Pages"),
    opened("/docs/style.css", handler=pages.docs_style, media_type="text/css", tag="Pages"),
    opened("/openapi.json", handler=pages.openapi_json, tag="Pages"),
)

NATIVE = (
    *_GENERATION,
    *_SESSIONS,
    *_HEALTH,
    *_INFO,
    *_METRICS,
    *_OBSERVE,
    *_CACHE,
    *_STORES,
    *_CONTROL,
    *_ADAPTERS,
    *_WEIGHTS,
    *_PAGES,
)
