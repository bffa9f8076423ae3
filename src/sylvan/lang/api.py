"""The functions for writing programs."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, overload

from sylvan.lang import ir
from sylvan.lang.choices import ChoicesMethod, token_length_normalized
from sylvan.lang.function import SglFunction, resolve_backend
from sylvan.lang.sampling import given
from sylvan.lang.settings import global_config


@overload
def function(
    func: Callable[..., Any],
    num_api_spec_tokens: int | None = None,
    *,
    timeout: float | None = None,
) -> SglFunction: ...


@overload
def function(
    func: None = None, num_api_spec_tokens: int | None = None, *, timeout: float | None = None
) -> Callable[[Callable[..., Any]], SglFunction]: ...


def function(
    func: Callable[..., Any] | None = None,
    num_api_spec_tokens: int | None = None,
    *,
    timeout: float | None = None,
) -> SglFunction | Callable[[Callable[..., Any]], SglFunction]:
    """Turn a function whose first parameter is the state `s` into a program.

    Used as a decorator, with or without parentheses. See `SglFunction`.
    """

    def decorate(body: Callable[..., Any]) -> SglFunction:
        return SglFunction(body, num_api_spec_tokens, timeout)

    return decorate if func is None else decorate(func)


def gen(  # noqa: PLR0913, PLR0917 - the signature that programs for SGLang rely on
    name: str | None = None,
    max_tokens: int | None = None,
    min_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    stop_token_ids: Sequence[int] | None = None,
    stop_regex: str | Sequence[str] | None = None,
    temperature: float | None = None,
    top_p: float | None = None,
    top_k: int | None = None,
    min_p: float | None = None,
    frequency_penalty: float | None = None,
    presence_penalty: float | None = None,
    ignore_eos: bool | None = None,
    return_logprob: bool | None = None,
    logprob_start_len: int | None = None,
    top_logprobs_num: int | None = None,
    return_text_in_logprobs: bool | None = None,
    dtype: type | str | None = None,
    choices: Sequence[str] | None = None,
    choices_method: ChoicesMethod | None = None,
    regex: str | None = None,
    json_schema: str | None = None,
    **sampling: Any,
) -> ir.Gen | ir.Select:
    """Let the model generate text.

    Arguments that are None use the values given to `run`. `sampling` accepts the other parameters
    of `sylvan.protocol.sampling.SamplingParams` by name.

    Args:
        name: Variable that receives the text; with `n` above 1 a list of texts.
        max_tokens: Maximum number of tokens.
        min_tokens: Minimum number of tokens.
        n: Number of samples; the first one continues the program's text.
        stop: Strings that end the text; they are not part of it.
        stop_token_ids: Tokens that end the text.
        stop_regex: Regular expressions that end the text.
        temperature: 0 always takes the most likely token.
        top_p: Sample from the smallest set of tokens with this total probability.
        top_k: Sample from this many most likely tokens.
        min_p: Sample from tokens at least this probable, relative to the most likely one.
        frequency_penalty: Penalty per earlier occurrence of a token.
        presence_penalty: Penalty for tokens that occurred before.
        ignore_eos: Do not stop at end-of-text tokens.
        return_logprob: Return log probabilities in the meta info.
        logprob_start_len: First prompt position with log probabilities.
        top_logprobs_num: Number of alternatives per position.
        return_text_in_logprobs: Include the text of tokens.
        dtype: int, float, bool or str: restrict the text to this type.
        choices: Select among these strings instead. See `select`.
        choices_method: Selection method.
        regex: Restrict the text to matches.
        json_schema: Restrict the text to JSON that matches the schema.
        sampling: Further sampling parameters.

    Raises:
        TypeError: an unknown sampling parameter.
        RequestError: an unknown dtype.
        re.error: `regex` is not a regular expression.
    """
    if choices:
        method = token_length_normalized if choices_method is None else choices_method
        return select(name, choices, 0.0 if temperature is None else temperature, method)
    values = {
        "max_new_tokens": max_tokens,
        "min_new_tokens": min_tokens,
        "n": n,
        "stop": stop,
        "stop_token_ids": stop_token_ids,
        "stop_regex": stop_regex,
        "temperature": temperature,
        "top_p": top_p,
        "top_k": top_k,
        "min_p": min_p,
        "frequency_penalty": frequency_penalty,
        "presence_penalty": presence_penalty,
        "ignore_eos": ignore_eos,
        "return_logprob": return_logprob,
        "logprob_start_len": logprob_start_len,
        "top_logprobs_num": top_logprobs_num,
        "return_text_in_logprobs": return_text_in_logprobs,
        "dtype": dtype,
        "regex": regex,
        "json_schema": json_schema,
    }
    if regex is not None:
        re.compile(regex)
        if dtype is not None:
            warnings.warn("gen(): dtype is given, so regex is not used", stacklevel=2)
    return ir.Gen(name, given({**values, **sampling}, "gen"))


def gen_int(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    **sampling: Any,
) -> ir.Gen | ir.Select:
    """Let the model generate an integer. See `gen`."""
    return gen(name, max_tokens, None, n, stop, dtype=int, **sampling)


def gen_string(
    name: str | None = None,
    max_tokens: int | None = None,
    n: int | None = None,
    stop: str | Sequence[str] | None = None,
    **sampling: Any,
) -> ir.Gen | ir.Select:
    """Let the model generate a string in double quotes. See `gen`."""
    return gen(name, max_tokens, None, n, stop, dtype=str, **sampling)


def select(
    name: str | None = None,
    choices: Sequence[str] | None = None,
    temperature: float = 0.0,
    choices_method: ChoicesMethod = token_length_normalized,
) -> ir.Select:
    """Let the model select one of `choices`.

    Raises:
        ValueError: there are no choices.
        TypeError: a choice is not a string.
    """
    if not choices:
        raise ValueError("select() needs choices")
    for choice in choices:
        if not isinstance(choice, str):
            raise TypeError(f"select() takes strings to choose from, not {choice!r}")
    return ir.Select(name, tuple(choices), temperature, choices_method)


def image(expr: Any) -> ir.Image:
    """An image: path, URL, bytes, or PIL image."""
    return ir.Image(expr)


def video(path: str, num_frames: int) -> ir.Video:
    """`num_frames` frames of a video file."""
    if num_frames < 1:
        raise ValueError(f"num_frames must be at least 1, not {num_frames}")
    return ir.Video(path, num_frames)


def _message(role: str, expr: Any) -> ir.ExprList:
    begin, end = ir.RoleBegin(role), ir.RoleEnd(role)
    return begin + end if expr is None else begin + expr + end


def system(expr: Any = None) -> ir.ExprList:
    """A system message."""
    return _message("system", expr)


def user(expr: Any = None) -> ir.ExprList:
    """A user message."""
    return _message("user", expr)


def assistant(expr: Any = None) -> ir.ExprList:
    """An assistant message."""
    return _message("assistant", expr)


def system_begin() -> ir.RoleBegin:
    """Open a system message."""
    return ir.RoleBegin("system")


def system_end() -> ir.RoleEnd:
    """Close the system message."""
    return ir.RoleEnd("system")


def user_begin() -> ir.RoleBegin:
    """Open a user message."""
    return ir.RoleBegin("user")


def user_end() -> ir.RoleEnd:
    """Close the user message."""
    return ir.RoleEnd("user")


def assistant_begin() -> ir.RoleBegin:
    """Open an assistant message."""
    return ir.RoleBegin("assistant")


def assistant_end() -> ir.RoleEnd:
    """Close the assistant message."""
    return ir.RoleEnd("assistant")


def separate_reasoning(expr: Any = None, model_type: str | None = None) -> ir.ExprList:
    """Keep the model's thinking out of the variables and the text of `expr`.

    The thinking of variable `x` is stored in `x_reasoning_content`.

    Args:
        expr: Gens, alone or among text.
        model_type: Name of the reasoning parser, e.g. "qwen3".

    Raises:
        ValueError: no expression or parser, or a gen without a name.
    """
    if expr is None or not model_type:
        raise ValueError("separate_reasoning() needs an expression and a model_type")
    separate = ir.SeparateReasoning(model_type, ir.as_expr(expr))
    separate.names()
    return ir.concatenate(expr, separate)


def set_default_backend(backend: Any) -> None:
    """Set the backend for programs whose `run` gets none."""
    global_config.default_backend = backend


def flush_cache(backend: Any = None) -> Any:
    """Empty the backend's prefix cache; returns False without a backend."""
    if backend is None and global_config.default_backend is None:
        return False
    return resolve_backend(backend).flush_cache()


def get_server_info(backend: Any = None) -> Any:
    """The server info of the backend; None without a backend."""
    if backend is None and global_config.default_backend is None:
        return None
    return resolve_backend(backend).get_server_info()
