"""`sylvan.Engine`: serves a model inside a Python program."""

from __future__ import annotations

import asyncio
import atexit
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Iterator, Sequence
from contextlib import aclosing, contextmanager
from types import TracebackType
from typing import Any, Self, TypeVar

from sylvan.api.native import GenerateBody, RequestBodyLimits
from sylvan.api.openai.vectors import EncodeBody, RerankBody, ScoreBody
from sylvan.api.validation import WireModel, parse
from sylvan.api.weights import (
    DiskBody,
    DistributedBody,
    GroupBody,
    MemoryBody,
    SocketBody,
    UpdateBody,
)
from sylvan.config import Config
from sylvan.media.encode import encode_images
from sylvan.protocol.errors import CapacityError, RequestError
from sylvan.runtime.engine.arguments import ServerArgs, configuration
from sylvan.runtime.engine.engine_control import EngineControl
from sylvan.runtime.engine.runtime import Runtime
from sylvan.runtime.engine.thread_bridge import END, SHUT_DOWN, ThreadBridge
from sylvan.runtime.engine.weights import EngineWeights, NamedTensors, safetensors_of
from sylvan.runtime.serving import embeddings, ranking
from sylvan.runtime.serving.labels import read_labels
from sylvan.runtime.serving.native import NativeCall, Reply
from sylvan.runtime.serving.ranking import ScoreResult
from sylvan.runtime.serving.service import make_service
from sylvan.text.tokenizer import Tokenizer

T = TypeVar("T")
B = TypeVar("B", bound=WireModel)


class InvalidRequestError(RequestError, ValueError):
    """Raised by `Engine` for a request that cannot be served; callers expect a ValueError."""


@contextmanager
def _value_errors() -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        raise InvalidRequestError(
            str(error), param=error.param, status=error.status, code=error.code
        ) from error


class Engine(EngineControl):
    """Serves a model inside this program, without HTTP.

    Keywords are fields of the configuration (`cache__page_size=16`), or SGLang's names
    for them (`model_path=...`, `mem_fraction_static=0.8`). By default (`processes`),
    everything runs in threads of this process. Any thread may call any method; each `async_`
    method runs on the event loop it is called from.

    Example:
        >>> with sylvan.Engine() as engine:  # doctest: +SKIP
        ...     print(engine.generate("2 + 2 =", {"max_new_tokens": 8})["text"])

    Raises:
        ConfigError: A keyword is unknown, or the model cannot be served; says what to change.
    """

    def __init__(self, *, server_args: ServerArgs | None = None, **keywords: object) -> None:
        args = ServerArgs(**(server_args.keywords if server_args else {}), **keywords)
        self._config = configuration(args)
        self._loop = _new_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="sylvan", daemon=True)
        self._thread.start()
        self._closed = False
        try:
            self._runtime = self._wait(Runtime.start(self._config))
        except BaseException:
            self._stop_loop()
            raise
        atexit.register(self.shutdown)
        self._service = make_service(self._runtime.manager, self._config.text, lambda: _LIMITS)

    @property
    def config(self) -> Config:
        """The resolved configuration."""
        return self._config

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._runtime.manager.tokenizer

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        *media: object,
        stream: bool = False,
        **fields: Any,
    ) -> Reply | list[Reply] | Iterator[Reply]:
        """Generate for one prompt, or a list of prompts.

        Args:
            prompt: Text, or a list of texts.
            sampling_params: As in the body of `/generate`; a list has one item per prompt.
            input_ids: Token IDs instead of text.
            *media: `image_data`, `audio_data` and `video_data`, in this order; items may also be
                paths, bytes and PIL images.
            stream: Return an iterator of growing answers; closing it aborts the request.
            **fields: Other fields of the body of `/generate`, such as `return_logprob`.

        Returns:
            What `/generate` answers: an object with `text`, `output_ids` and `meta_info`, or a
            list of them for several prompts or samples.

        Raises:
            RequestError: The request cannot be served; names the field.
            CapacityError: The request cannot be served now.
        """
        call = self._call(prompt, sampling_params, input_ids, media, stream=stream, **fields)
        return self._iterate(_kept(call.stream())) if stream else self._wait(call.whole())

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: dict[str, Any] | Sequence[dict[str, Any]] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        *media: object,
        stream: bool = False,
        **fields: Any,
    ) -> Reply | list[Reply] | AsyncIterator[Reply]:
        """As `generate`, on the caller's event loop; with `stream` an async iterator."""
        call = self._call(prompt, sampling_params, input_ids, media, stream=stream, **fields)
        return (
            self._iterate_async(_kept(call.stream()))
            if stream
            else await self._bridge(call.whole())
        )

    def encode(
        self,
        prompt: str | Sequence[str] | Sequence[Sequence[str]] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        **fields: Any,
    ) -> Reply | list[Reply]:
        """Embed or classify texts, or pairs of texts.

        Args:
            prompt: A text, a list of texts, or a list of pairs.
            input_ids: Token IDs instead of texts.
            **fields: Other fields of the body of `/encode`, such as `dimensions`.

        Returns:
            What `/encode` answers: an object with `embedding` and `meta_info`, or a list of them.

        Raises:
            RequestError: The request cannot be served, or the model has no embeddings.
            CapacityError: The request cannot be served now.
        """
        return self._wait(self._encode(prompt, input_ids, fields))

    async def async_encode(
        self,
        prompt: str | Sequence[str] | Sequence[Sequence[str]] | None = None,
        input_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        **fields: Any,
    ) -> Reply | list[Reply]:
        """As `encode`, on the caller's event loop."""
        return await self._bridge(self._encode(prompt, input_ids, fields))

    def rerank(
        self,
        prompt: Sequence[Sequence[str]] | None = None,
        *,
        query: str | None = None,
        documents: Sequence[str] = (),
        **fields: Any,
    ) -> Reply | list[Reply]:
        """Rank documents by relevance to a query, best first, as `/v1/rerank` does.

        Args:
            prompt: Alternatively to the others: pairs of texts, passed to `encode`.
            query: The query.
            documents: The documents.
            **fields: Other fields of the body of `/v1/rerank`, such as `top_n`.

        Raises:
            RequestError: The request cannot be served, or not by this model.
            CapacityError: The request cannot be served now.
        """
        if prompt is not None:
            return self.encode(prompt, **fields)
        body = _body(RerankBody, {"query": query, "documents": _listed(documents), **fields})
        labels = read_labels(self._runtime.manager.facts.model_path)
        return self._wait(ranking.rerank(self._caller, body, labels, self._service.template))

    def score(self, query: object = None, items: object = None, **fields: Any) -> ScoreResult:
        """Return probabilities of label tokens after query and item, as `/v1/score` does.

        Raises:
            RequestError: The request cannot be served, or not by this model.
            CapacityError: The request cannot be served now.
        """
        return self._wait(self._score(query, items, fields))

    async def async_score(
        self, query: object = None, items: object = None, **fields: Any
    ) -> ScoreResult:
        """As `score`, on the caller's event loop."""
        return await self._bridge(self._score(query, items, fields))

    def update_weights_from_disk(
        self, model_path: str, load_format: str | None = None, **fields: Any
    ) -> tuple[bool, str]:
        """Replace all weights with a checkpoint's; returns (False, reason) if the old ones stay.

        Args:
            model_path: Its directory.
            load_format: Format of its files.
            **fields: Other fields of the body of `/update_weights_from_disk`.
        """
        given = {"model_path": model_path, "load_format": load_format, **fields}
        return self._wait(self._weights.from_disk(_body(DiskBody, given)))

    def update_weights_from_tensor(
        self, named_tensors: NamedTensors, **fields: Any
    ) -> tuple[bool, str]:
        """Replace some or all weights, through shared memory.

        Args:
            named_tensors: PyTorch tensors by checkpoint name, as pairs or a mapping.
            **fields: `flush_cache`, `abort_all_requests`, `weight_version`.
        """
        return self._wait(self._weights.from_tensors(named_tensors, _body(UpdateBody, fields)))

    def begin_weight_update(self) -> None:
        """Collect the tensors of the following updates until `end_weight_update`."""
        self._wait(self._runtime.manager.updates.begin())

    def end_weight_update(self) -> tuple[bool, str]:
        """Commit all collected tensors, or none of them.

        Raises:
            RequestError: No update was begun, or nothing was collected.
        """
        return self._wait(self._weights.end())

    def init_weights_update_group(self, **fields: Any) -> tuple[bool, str]:
        """Join a process group, as described by the body of `/init_weights_update_group`."""
        return self._wait(self._weights.join_group(_body(GroupBody, fields)))

    def destroy_weights_update_group(
        self, group_name: str = "weight_update_group"
    ) -> tuple[bool, str]:
        """Leave a process group."""
        return self._wait(self._weights.leave_group(group_name))

    def update_weights_from_distributed(
        self, names: Sequence[str], dtypes: Sequence[object], shapes: object, **fields: Any
    ) -> tuple[bool, str]:
        """Replace weights with what rank 0 of a group broadcasts."""
        given = {
            "names": _listed(names),
            "dtypes": [str(kind).removeprefix("torch.") for kind in dtypes],
            "shapes": _listed(shapes),
            **fields,
        }
        return self._wait(self._weights.from_distributed(_body(DistributedBody, given)))

    def update_weights_from_ipc(
        self, zmq_handles: dict[str, str], **fields: Any
    ) -> tuple[bool, str]:
        """Replace weights with safetensors files from a local ZeroMQ REP socket."""
        given = {"zmq_handles": zmq_handles, **fields}
        return self._wait(self._weights.from_ipc(_body(SocketBody, given)))

    def load_lora_adapter(
        self, lora_name: str, lora_path: str, pinned: bool = False
    ) -> tuple[bool, str]:
        """Load a LoRA adapter from a directory under a name, which requests give as `lora_path`.

        Returns: whether it was loaded, and the error.
        """
        return self._wait(self._load_adapter(lora_name, lora_path, pinned=pinned))

    async def async_load_lora_adapter(
        self, lora_name: str, lora_path: str, pinned: bool = False
    ) -> tuple[bool, str]:
        """As `load_lora_adapter`, on the caller's event loop."""
        return await self._bridge(self._load_adapter(lora_name, lora_path, pinned=pinned))

    def load_lora_adapter_from_tensors(
        self,
        lora_name: str,
        tensors: NamedTensors,
        config_dict: dict[str, Any],
        pinned: bool = False,
    ) -> tuple[bool, str]:
        """Load a LoRA adapter from memory.

        Args:
            lora_name: Name that requests give as `lora_path`.
            tensors: PyTorch tensors of `adapter_model.safetensors`, as pairs or a mapping.
            config_dict: Contents of `adapter_config.json`.
            pinned: Never evict it from host memory or the device.

        Returns: whether it was loaded, and the error.
        """
        return self._wait(self._send_adapter(lora_name, tensors, config_dict, pinned=pinned))

    async def async_load_lora_adapter_from_tensors(
        self,
        lora_name: str,
        tensors: NamedTensors,
        config_dict: dict[str, Any],
        pinned: bool = False,
    ) -> tuple[bool, str]:
        """As `load_lora_adapter_from_tensors`, on the caller's event loop."""
        sent = self._send_adapter(lora_name, tensors, config_dict, pinned=pinned)
        return await self._bridge(sent)

    def unload_lora_adapter(self, lora_name: str, abort_requests: bool = False) -> tuple[bool, str]:
        """Unload an adapter; `abort_requests` aborts its running requests.

        Returns: whether there was one, and the error.
        """
        return self._wait(self._unload_adapter(lora_name, abort=abort_requests))

    async def async_unload_lora_adapter(
        self, lora_name: str, abort_requests: bool = False
    ) -> tuple[bool, str]:
        """As `unload_lora_adapter`, on the caller's event loop."""
        return await self._bridge(self._unload_adapter(lora_name, abort=abort_requests))

    def get_weights_by_name(self, name: str, truncate_size: int = 100) -> list[Any]:
        """Return the first rows of a tensor, as nested lists.

        Raises:
            RequestError: There is no tensor of that name.
        """
        return self._wait(self._weights.tensor(name, truncate_size))

    def check_weights(self, skip_tensor_list: Sequence[str] = ()) -> dict[str, str]:
        """Return a checksum of each tensor, except the named ones."""
        return self._wait(self._weights.checksums(tuple(skip_tensor_list)))

    def release_memory_occupation(self, tags: Sequence[str] | None = None) -> dict[str, Any]:
        """Release memory by tags; requests wait until it is resumed.

        Raises:
            RequestError: It cannot be released.
        """
        return self._wait(self._weights.release(_body(MemoryBody, {"tags": _listed(tags)})))

    def resume_memory_occupation(self, tags: Sequence[str] | None = None) -> dict[str, Any]:
        """Allocate the memory again, and continue."""
        return self._wait(self._weights.resume(_body(MemoryBody, {"tags": _listed(tags)})))

    def shutdown(self) -> None:
        """Stop everything and free the memory; idempotent."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.shutdown)
        asyncio.run_coroutine_threadsafe(self._runtime.close(), self._loop).result()
        self._stop_loop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.shutdown()

    def _call(
        self,
        prompt: object,
        sampling_params: object,
        input_ids: object,
        media: Sequence[object],
        **fields: Any,
    ) -> NativeCall:
        given = {name: fields.get(name) for name in _MEDIA} | dict(zip(_MEDIA, media, strict=False))
        body = {
            "text": _listed(prompt),
            "sampling_params": _listed(sampling_params),
            "input_ids": _listed(input_ids),
            **fields,
            **{name: encode_images(item) for name, item in given.items() if item is not None},
        }
        with _value_errors():
            return NativeCall(self._service, _body(GenerateBody, body))

    @property
    def _weights(self) -> EngineWeights:
        return EngineWeights(self._runtime.manager.updates)

    @property
    def _caller(self) -> embeddings.EmbeddingCaller:
        return embeddings.EmbeddingCaller(manager=self._runtime.manager)

    async def _load_adapter(self, name: str, path: str, *, pinned: bool) -> tuple[bool, str]:
        return await _succeeds(self._runtime.manager.adapters.load(name, path, pinned=pinned))

    async def _send_adapter(
        self, name: str, tensors: NamedTensors, config: dict[str, Any], *, pinned: bool
    ) -> tuple[bool, str]:
        data, adapters = safetensors_of(tensors), self._runtime.manager.adapters
        return await _succeeds(adapters.load_tensors(name, config, data, pinned=pinned))

    async def _unload_adapter(self, name: str, *, abort: bool) -> tuple[bool, str]:
        return await _succeeds(self._runtime.manager.adapters.unload(name, abort=abort))

    async def _encode(
        self, prompt: object, input_ids: object, fields: dict[str, Any]
    ) -> Reply | list[Reply]:
        given = {"text": _listed(prompt), "input_ids": _listed(input_ids)}
        return await embeddings.encode(self._caller, _body(EncodeBody, given | fields))

    async def _score(self, query: object, items: object, fields: dict[str, Any]) -> ScoreResult:
        given = {"query": _listed(query), "items": _listed(items)}
        reply = await ranking.score(self._caller, _body(ScoreBody, given | fields))
        tokens = reply["usage"]["prompt_tokens"]
        return ScoreResult(reply["scores"], tokens, reply.get("token_logprobs"))

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Run on the engine's loop; interrupting the wait cancels the work."""
        if self._closed:
            work.close()
            raise CapacityError(SHUT_DOWN)
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            with _value_errors():
                return future.result()
        except BaseException:
            future.cancel()
            raise

    async def _bridge(self, work: Coroutine[Any, Any, T]) -> T:
        with _value_errors():
            return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def _iterate(self, replies: AsyncGenerator[Reply, None]) -> Iterator[Reply]:
        feed = self._feed(replies)
        try:
            while True:
                with _value_errors():
                    reply = feed.read().result()
                if reply is END:
                    return
                yield reply
        finally:
            if not self._closed:
                self._wait(feed.close())

    async def _iterate_async(self, replies: AsyncGenerator[Reply, None]) -> AsyncIterator[Reply]:
        feed = self._feed(replies)
        try:
            while True:
                with _value_errors():
                    reply = await asyncio.wrap_future(feed.read())
                if reply is END:
                    return
                yield reply
        finally:
            if not self._closed:
                await self._bridge(feed.close())

    def _feed(self, replies: AsyncGenerator[Reply, None]) -> ThreadBridge[Reply]:
        if self._closed:
            raise CapacityError(SHUT_DOWN)
        return ThreadBridge(replies, self._loop)

    def _stop_loop(self) -> None:
        asyncio.run_coroutine_threadsafe(_close_loop(self._loop), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


_LIMITS = RequestBodyLimits(max_samples=65536, max_top_logprobs=1024)
_MEDIA = ("image_data", "audio_data", "video_data")


def _new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop  # does not exist on Windows
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def _body(kind: type[B], fields: dict[str, Any]) -> B:
    """Build the body of a route; unknown fields are dropped."""
    with _value_errors():
        checked = parse(kind, fields)
        if checked.model_extra:
            names = ", ".join(sorted(checked.model_extra))
            raise RequestError(f"the engine takes no {names} here", param=names)
    return checked


def _listed(value: object) -> object:
    """Convert tuples and arrays to the lists of a JSON body."""
    if isinstance(value, str | dict) or value is None:
        return value
    if hasattr(value, "tolist"):
        return value.tolist()  # type: ignore[attr-defined]
    if isinstance(value, Sequence):
        return [_listed(item) for item in value]
    return value


async def _close_loop(loop: asyncio.AbstractEventLoop) -> None:
    """Clean up the loop, as `asyncio.run` does at its end."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    await loop.shutdown_asyncgens()
    await loop.shutdown_default_executor()


async def _kept(replies: AsyncGenerator[Reply, None]) -> AsyncGenerator[Reply, None]:
    """Copy answers, because the lists in a stream's answers keep growing."""
    async with aclosing(replies):
        async for reply in replies:
            meta = reply["meta_info"].items()
            lists = {key: list(v) if isinstance(v, list) else v for key, v in meta}
            yield {**reply, "output_ids": list(reply["output_ids"]), "meta_info": lists}


async def _succeeds(work: Coroutine[Any, Any, object]) -> tuple[bool, str]:
    try:
        await work
    except RequestError as error:
        return False, str(error)
    return True, ""
