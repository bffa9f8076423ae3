"""Validates requests before they reach a scheduler, and fills in defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from sylvan.protocol.arrays import EMPTY_IDS, IntArray
from sylvan.protocol.errors import ContextLengthError, RequestError
from sylvan.protocol.media import MediaKind
from sylvan.protocol.requests import GenerateRequest, LogprobOptions
from sylvan.protocol.sampling import SamplingParams, fault_of
from sylvan.runtime.tokenizer.types import GenerateInput, ServedModelInfo
from sylvan.text.stops import StopFinder

MAX_TOP_LOGPROBS = 1024
MAX_LOGPROB_IDS = 1024
MAX_RID_CHARS = 256
MAX_TIMEOUT_S = 86400.0
MAX_CHARS_PER_TOKEN = 256  # a text longer than this many characters per token of context cannot fit
_REMEMBERED, _REMEMBERED_BYTES = 256, 4096
_TIMES = (
    ("deadline_s", MAX_TIMEOUT_S),
    ("ttft_ms", MAX_TIMEOUT_S * 1e3),
    ("tpot_ms", MAX_TIMEOUT_S * 1e3),
)
_FEW_IDS = 256
_INT32 = range(-(2**31), 2**31)


PromptIds = Sequence[int] | IntArray


class CheckedPrompt(msgspec.Struct, frozen=True):
    """Token IDs of a prompt, and the field they came from."""

    ids: PromptIds
    param: str


def check_input(inp: GenerateInput, facts: ServedModelInfo) -> None:
    """Check what can be checked before tokenisation.

    Raises:
        RequestError: A field is out of range; the message names it.
    """
    if (inp.text is None) == (inp.input_ids is None):
        given = "neither" if inp.text is None else "both"
        raise RequestError(f"one of text and input_ids is needed, not {given}", param="text")
    if inp.text is not None and len(inp.text) > MAX_CHARS_PER_TOKEN * facts.context_len:
        raise ContextLengthError.of_text(len(inp.text), facts.context_len, "text")
    if inp.rid is not None and not 0 < len(inp.rid) <= MAX_RID_CHARS:
        raise RequestError(f"rid must have 1 to {MAX_RID_CHARS} characters", param="rid")
    if inp.options.priority not in _INT32:
        raise RequestError("priority must be a 32-bit integer", param="priority")
    for name in ("denoising_steps", "confidence"):
        if getattr(inp.options, name) is not None and not facts.extra.get("block"):
            raise RequestError(f"{name}: this model writes token by token.", param=name)
    _check_times(inp)


class CheckedParams:
    """Recognises sampling parameters that were checked before: the prompts of a body share theirs.

    Equal numbers of different bodies are one object, too (`api.sampling.read_sampling`).
    """

    def __init__(self) -> None:
        self._facts: ServedModelInfo | None = None
        self._known: dict[int, SamplingParams] = {}

    def check(self, sampling: SamplingParams, facts: ServedModelInfo, limit: int) -> None:
        """Check as `check_sampling` and `check_bytes` do, unless it is known to pass.

        Raises:
            RequestError: A field is out of range, or all together are larger than `limit` bytes.
        """
        if facts is not self._facts:
            self._facts = facts
            self._known.clear()
        if self._known.get(id(sampling)) is sampling:
            return
        check_sampling(sampling, facts)
        if check_bytes([sampling], limit) > _REMEMBERED_BYTES:
            return
        while len(self._known) >= _REMEMBERED:
            del self._known[next(iter(self._known))]
        self._known[id(sampling)] = sampling


def check_bytes(samplings: Sequence[SamplingParams], limit: int) -> int:
    """Check the size of one request's sampling parameters, summed over all its samples.

    Returns the size in bytes.

    Raises:
        RequestError: It exceeds `limit` bytes; the message names the largest field.
    """
    sizes: dict[int, int] = {}
    total = 0
    for sampling in samplings:  # many prompts share one object
        if id(sampling) not in sizes:
            sizes[id(sampling)] = len(msgspec.msgpack.encode(sampling))
        total += sampling.n * sizes[id(sampling)]
    if total <= limit:
        return total
    largest = max(samplings, key=lambda sampling: sizes[id(sampling)])
    name = max(
        SamplingParams.__struct_fields__,
        key=lambda name: len(msgspec.msgpack.encode(getattr(largest, name))),
    )
    count = sum(sampling.n for sampling in samplings)
    raise RequestError(
        f"{name}: the sampling parameters of {count} samples take {total} bytes together; this "
        f"server allows {limit} (limits.parameter_bytes)",
        param=name,
        setting="limits.parameter_bytes",
    )


def build_request(
    inp: GenerateInput, prompt: CheckedPrompt, facts: ServedModelInfo, *, seed: int
) -> GenerateRequest:
    """Build the request of sample 0, with all defaults filled in.

    `seed` is used if the client set none. The request ID is not set yet.

    Raises:
        RequestError: Prompt and sampling parameters conflict, or do not fit.
    """
    ids = _check_prompt(prompt, facts, facts.media_tokens if inp.media else {})
    sampling = inp.sampling
    max_new_tokens = _max_new_tokens(len(ids), sampling, facts)
    sampling = msgspec.structs.replace(
        sampling,
        max_new_tokens=max_new_tokens,
        sampling_seed=seed if sampling.sampling_seed is None else sampling.sampling_seed,
    )
    if sampling.min_new_tokens > max_new_tokens:
        raise RequestError(
            f"min_new_tokens is {sampling.min_new_tokens}, more than max_new_tokens, "
            f"{max_new_tokens}",
            param="min_new_tokens",
        )
    if inp.logprobs is not None:
        _check_logprobs(inp.logprobs, len(ids), facts)
    return GenerateRequest(
        rid="",
        input_ids=ids,
        output_ids=EMPTY_IDS,
        sampling=sampling,
        eos_ids=() if sampling.ignore_eos else facts.eos_ids,
        logprobs=inp.logprobs,
        tenant=inp.tenant,
        cache_salt=inp.cache_salt,
        thinking=inp.thinking,
        align=inp.align,
        **msgspec.structs.asdict(inp.options),
    )


def check_logprob_room(request: GenerateRequest, limit: int) -> None:
    """Check how many log probabilities a request may return, over all its samples.

    Raises:
        RequestError: There are more than `limit`; the message names the factor that is too large.
    """
    options = request.logprobs
    if options is None:
        return
    prompt_len = len(request.input_ids)
    of_prompt = 0 if options.start is None else prompt_len - options.start
    output = request.sampling.max_new_tokens or 0
    each = 1 + options.top + len(options.token_ids)
    total = request.sampling.n * (of_prompt + output) * each
    if total > limit:
        name = "top_logprobs_num" if options.top >= len(options.token_ids) else "token_ids_logprob"
        raise RequestError(
            f"{name}: {each} log probabilities at each of up to {of_prompt + output} positions of "
            f"{request.sampling.n} samples are {total}; this server allows {limit} "
            "(limits.logprobs)",
            param=name,
            setting="limits.logprobs",
        )


def check_ids(ids: Sequence[int] | IntArray, vocab_size: int, param: str) -> IntArray:
    """Copy token IDs into an array.

    Raises:
        RequestError: They are not a list of integers, or one is outside the vocabulary.
    """
    if len(ids) == 0:
        return EMPTY_IDS
    try:
        array = np.asarray(ids)
    except (ValueError, OverflowError) as error:
        raise RequestError(f"{param} must be a list of token ids", param=param) from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise RequestError(f"{param} must be a list of token ids", param=param)
    if isinstance(ids, list) and len(ids) <= _FEW_IDS:  # numpy takes longer to start
        low, high = min(ids), max(ids)
    else:
        low, high = int(array.min()), int(array.max())
    if low < 0 or high >= vocab_size:
        where = int(((array < 0) | (array >= vocab_size)).argmax())
        raise RequestError(
            f"{param}[{where}] is {array[where]}; token ids of this model are 0 to "
            f"{vocab_size - 1}",
            param=param,
        )
    return array.astype(np.int32)


def _check_times(inp: GenerateInput) -> None:
    for name, limit in _TIMES:
        value = getattr(inp.options, name)
        if value is not None and not 0 < value <= limit:
            message = f"{name} must be a positive number, at most {limit:g}"
            raise RequestError(message, param=name)


def _check_prompt(
    prompt: CheckedPrompt, facts: ServedModelInfo, media: Mapping[MediaKind, int]
) -> IntArray:
    """`media`: placeholders, which may be no tokens of the vocabulary, if it may hold any."""
    if len(prompt.ids) == 0:
        raise RequestError(f"{prompt.param} is empty; the prompt needs a token", param=prompt.param)
    if len(prompt.ids) >= facts.max_request_tokens:
        limit = facts.max_request_tokens
        raise ContextLengthError.of_prompt(len(prompt.ids), limit, prompt.param)
    count = max((facts.vocab_size, *(t + 1 for t in media.values())))
    return check_ids(prompt.ids, count, prompt.param)


def _max_new_tokens(prompt_len: int, sampling: SamplingParams, facts: ServedModelInfo) -> int:
    room = facts.max_request_tokens - prompt_len
    wanted = sampling.max_new_tokens
    if wanted is not None and wanted > room:
        raise ContextLengthError.of_output(prompt_len, wanted, facts.max_request_tokens)
    return room if wanted is None else wanted


def check_sampling(sampling: SamplingParams, facts: ServedModelInfo) -> None:
    """Check what does not depend on the prompt.

    Raises:
        RequestError: A field is out of range; the message names it.
    """
    try:  # bounds of the type, for parameters that did not come from a body
        msgspec.convert(msgspec.structs.asdict(sampling), SamplingParams)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at ")
        param = path.strip("`$.").partition("[")[0] or None
        raise RequestError(f"{param or 'sampling_params'}: {message}", param=param) from error
    if (fault := fault_of(sampling)) is not None:
        message = f"{fault.name}{fault.place}: {fault.text}"
        raise RequestError(message, param=fault.name)
    if sampling.stop_token_ids:
        check_ids(sampling.stop_token_ids, facts.vocab_size, "stop_token_ids")
    _check_bias(sampling.logit_bias, facts.vocab_size)
    if sampling.stop or sampling.stop_regex:
        StopFinder(sampling.stop, sampling.stop_regex)


def _check_bias(bias: dict[str, float], vocab_size: int) -> None:
    for key in bias:
        if int(key) >= vocab_size:
            message = f"logit_bias.{key}: token ids of this model are 0 to {vocab_size - 1}"
            raise RequestError(message, param="logit_bias")


def _check_logprobs(options: LogprobOptions, prompt_len: int, facts: ServedModelInfo) -> None:
    limit = min(MAX_TOP_LOGPROBS, facts.vocab_size)
    if not 0 <= options.top <= limit:
        raise RequestError(
            f"top_logprobs_num is {options.top}; it must be between 0 and {limit}",
            param="top_logprobs_num",
        )
    if options.start is not None and not 0 <= options.start <= prompt_len:
        raise RequestError(
            f"logprob_start_len is {options.start}; the prompt has {prompt_len} tokens",
            param="logprob_start_len",
        )
    if len(options.token_ids) > MAX_LOGPROB_IDS:
        raise RequestError(
            f"token_ids_logprob names {len(options.token_ids)} ids; at most {MAX_LOGPROB_IDS} "
            "are allowed",
            param="token_ids_logprob",
        )
    check_ids(options.token_ids, facts.vocab_size, "token_ids_logprob")
