"""The HTTP application of an encoder server (`media.encoder_only`)."""

from __future__ import annotations

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from sylvan.config.values import Secret
from sylvan.media.messages import EncodeItem
from sylvan.media.remote import PATH, TYPE
from sylvan.protocol.errors import CapacityError
from sylvan.runtime.features.multimodal.encoder_service import EncoderService
from sylvan.transport.api import MessageError
from sylvan.transport.codec import MessageDecoder, MessageEncoder

_BESIDE_ITEM = 64 << 10  # bytes of an order besides its item


class EncoderApp:
    """Answers `/encode_item`, `/health` and `/metrics`.

    Args:
        service: Encodes.
        item_bytes: Size of the largest item.
        key: Key that callers must send; None: no key is required.
    """

    def __init__(self, service: EncoderService, item_bytes: int, key: Secret | None) -> None:
        self._service, self._key = service, key
        self._max_bytes = item_bytes + _BESIDE_ITEM
        self._encoder = MessageEncoder(limit=None)
        self._decoder = MessageDecoder[EncodeItem](EncodeItem)
        self.app = Starlette(
            routes=[
                Route(PATH, self._encode, methods=["POST"]),
                Route("/health", self._health),
                Route("/metrics", self._metrics),
            ]
        )

    async def _encode(self, request: Request) -> Response:
        if (refusal := self._refusal(request)) is not None:
            return refusal
        parts: list[bytes] = []
        size = 0
        async for part in request.stream():
            size += len(part)
            if size > self._max_bytes:
                return _error(413, f"the item is larger than {self._max_bytes} bytes")
            parts.append(part)
        try:
            order = self._decoder.decode(b"".join(parts))
        except MessageError as error:
            return _error(400, str(error))
        try:
            found = await self._service.encode(order)
        except CapacityError as error:
            return _error(503, str(error))
        return Response(self._encoder.encode(found), media_type=TYPE)

    def _refusal(self, request: Request) -> Response | None:
        if self._key is None:
            return None
        scheme, _, presented = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and self._key.matches(presented.strip()):
            return None
        return _error(401, "Unauthorized")

    async def _health(self, request: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _metrics(self, request: Request) -> Response:
        found = {
            "sylvan_encoder_items_total": self._service.encoded,
            "sylvan_encoder_reused_items_total": self._service.reused,
        }
        lines = [f"# TYPE {name} counter\n{name} {count}\n" for name, count in found.items()]
        return PlainTextResponse("".join(lines))


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "code": status}}, status_code=status)
