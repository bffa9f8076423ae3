"""Executes nodes on a state: one method per node type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from sylvan.lang import ir
from sylvan.lang.backends.api import BaseBackend
from sylvan.lang.context import StateContext
from sylvan.lang.media import encode_video
from sylvan.lang.reasoning import split_reasoning
from sylvan.lang.sampling import GenParams
from sylvan.lang.speculation import ChatSpeculation, CompletionSpeculation, StateSpeculation
from sylvan.media.encode import encode_image


class Sink(Protocol):
    """Receives the interpreter's results; see `StreamExecutor`."""

    def publish(self, name: str) -> None:
        """The variable `name` has its value."""
        ...

    def progress(self) -> None:
        """Text was appended."""
        ...


class Interpreter:
    """Executes nodes on a context, one at a time, with calls to a backend."""

    def __init__(
        self, context: StateContext, backend: BaseBackend, defaults: GenParams, sink: Sink
    ) -> None:
        self.context = context
        self.backend = backend
        self.defaults = defaults
        self._sink = sink
        self._spec = self._speculation()

    def execute(self, node: ir.Expr) -> None:
        """Execute `node`; returns when it is done.

        Raises:
            Any error of the backend.
        """
        handler = _HANDLERS.get(type(node))
        if handler is None:
            raise TypeError(f"{node!r} cannot be executed")
        handler(self, node)

    def _speculation(self) -> StateSpeculation | None:
        tokens = self.context.num_api_spec_tokens
        if tokens is None:
            return None
        kind = ChatSpeculation if self.backend.is_chat_model else CompletionSpeculation
        return kind(tokens, lambda params: self.backend.generate(self.context, params))

    def _append(self, text: str, *, of_message: bool = True) -> None:
        of_message = of_message and self.context.cur_role == "assistant"
        if self._spec is None or not self._spec.fill(text, of_message=of_message):
            self.context.text_ += text

    def _set(self, name: str | None, value: Any, meta: Any = None) -> None:
        if name is None:
            return
        self.context.variables[name] = value
        if meta is not None:
            self.context.meta_info[name] = meta
        self._sink.publish(name)

    def _append_value(self, name: str | None, text: str) -> None:
        start = len(self.context.text_)
        self.context.text_ += text
        if name is not None:
            self.context.spans[name] = (start, len(self.context.text_))

    def fill(self, node: ir.ConstantText) -> None:
        """Append the program's text."""
        self._append(node.value)

    def gen(self, node: ir.Gen) -> None:
        """Append the model's text."""
        params = self.defaults.override(node.params, self.context.chat_template.stop_str)
        if self.context.stream:
            self._gen_stream(node.name, params)
            return
        if self._spec is None:
            result = self.backend.generate(self.context, params)
        else:
            result = self._spec.gen(node.name, params)
        if result is None:
            return
        value, meta = result
        self._append_value(node.name, value[0] if isinstance(value, list) else value)
        self._set(node.name, value, meta)

    def _gen_stream(self, name: str | None, params: GenParams) -> None:
        if self._spec is not None:
            raise ValueError("stream=True does not work with num_api_spec_tokens")
        context = self.context
        start = len(context.text_)
        samples = [""] * params.n
        metas: list[Any] = [{}] * params.n
        for delta, meta, *index in self.backend.generate_stream(context, params):
            context.scope.check()
            sample = index[0] if index else 0
            samples[sample] += delta
            metas[sample] = meta
            if sample == 0:
                context.text_ += delta
                if name is not None:
                    context.variables[name] = samples[0]
                    context.meta_info[name] = meta
                self._sink.progress()
        if name is not None:
            context.spans[name] = (start, len(context.text_))
        many = params.n > 1
        self._set(name, samples if many else samples[0], metas if many else metas[0])

    def select(self, node: ir.Select) -> None:
        """Append the best choice."""
        decision = self.backend.select(
            self.context, list(node.choices), node.temperature, node.method
        )
        self._append_value(node.name, decision.decision)
        self._set(node.name, decision.decision, decision.meta_info)

    def role_begin(self, node: ir.RoleBegin) -> None:
        """Open a chat message; before the first one, the template's system message."""
        context, template = self.context, self.context.chat_template
        if context.cur_role is not None:
            raise ValueError(
                f"a {node.role} message cannot begin inside a {context.cur_role} message"
            )
        if not context.messages_ and node.role != "system" and template.default_system_prompt:
            self.role_begin(ir.RoleBegin("system"))
            self._append(template.default_system_prompt)
            self.role_end(ir.RoleEnd("system"))
        prefix, _ = template.get_prefix_and_suffix(node.role, context.messages_)
        context.cur_role = node.role
        self._append(prefix, of_message=False)
        context.cur_role_begin_pos = len(context.text_)

    def role_end(self, node: ir.RoleEnd) -> None:
        """Close the chat message."""
        if self.context.cur_role != node.role:
            raise ValueError(f"no {node.role} message to end")
        self._request_deferred()
        suffix = self.context.chat_template.get_prefix_and_suffix(
            node.role, self.context.messages_
        )[1]
        if isinstance(self._spec, CompletionSpeculation):
            self._spec.fill(suffix, of_message=False)
        self.context.end_message(suffix)

    def _request_deferred(self) -> None:
        """Request what API speculation deferred in this message."""
        if self._spec is None or self.context.cur_role != "assistant":
            return
        for name, text in self._spec.end_message():
            self._append_value(name, text)
            self._set(name, text, {})

    def image(self, node: ir.Image) -> None:
        """Append an image."""
        template = self.context.chat_template
        self._add_picture(node.source, encode_image(node.source), template.image_token)

    def video(self, node: ir.Video) -> None:
        """Append frames of a video."""
        frames = encode_video(node.path, node.num_frames)
        self._add_picture(node.path, frames, self.context.chat_template.video_token)

    def _add_picture(self, source: Any, data: str, token: str) -> None:
        self.context.images_.append((source, data))
        self.context.cur_images.append((source, data))
        self.context.text_ += token

    def variable(self, node: ir.Variable) -> None:
        """Append the value of a variable of another state."""
        self._append(str(node.source.get_var(node.name)))

    def argument(self, node: ir.Argument) -> None:
        """Append the value of an argument of the program."""
        self._append(str(self.context.arguments[node.name]))

    def scope_begin(self, node: ir.VarScopeBegin) -> None:
        """Remember the start of the variable's text."""
        self.context.scopes[node.name] = len(self.context.text_)

    def scope_end(self, node: ir.VarScopeEnd) -> None:
        """Set the variable to the text since the scope started."""
        begin = self.context.scopes.pop(node.name)
        self._set(node.name, self.context.text_[begin:])

    def commit(self, node: ir.CommitLazy) -> None:
        """Let the backend cache the text, as a prefix of the text that follows."""
        del node
        self.backend.commit_lazy_operations(self.context)

    def concatenate(self, node: ir.ConcatenateAndAppend) -> None:
        """Append the text that forked states added since the fork."""
        if self.backend.support_concate_and_append:
            self.backend.concatenate_and_append(
                [s.context.sid for s in node.states], self.context.sid
            )
        for state in node.states:
            state.sync()
            self._append(state.context.text_[state.context.fork_start_text_pos :])

    def separate_reasoning(self, node: ir.SeparateReasoning) -> None:
        """Move thinking out of variables, and out of the text unless it is being streamed."""
        self._request_deferred()
        for name in node.names():
            prompt = self.context.text_[: self.context.spans[name][0]]
            value = self.context.variables[name]
            thinking, answer = split_reasoning(node.model_type, value, prompt)
            if not self.context.stream:
                self._replace(name, answer[0] if isinstance(answer, list) else answer)
            self._set(ir.reasoning_name(name), thinking)
            self._set(name, answer)

    def _replace(self, name: str, text: str) -> None:
        """Replace the variable's value in the text by `text`."""
        context = self.context
        start, end = context.spans[name]
        context.text_ = context.text_[:start] + text + context.text_[end:]
        shift = start + len(text) - end
        context.spans = {
            other: (a + shift, b + shift) if a >= end else (a, b)
            for other, (a, b) in context.spans.items()
        }
        context.spans[name] = (start, start + len(text))


_HANDLERS: Mapping[type[ir.Expr], Callable[[Interpreter, Any], None]] = MappingProxyType({
    ir.ConstantText: Interpreter.fill,
    ir.Gen: Interpreter.gen,
    ir.Select: Interpreter.select,
    ir.RoleBegin: Interpreter.role_begin,
    ir.RoleEnd: Interpreter.role_end,
    ir.Image: Interpreter.image,
    ir.Video: Interpreter.video,
    ir.Variable: Interpreter.variable,
    ir.Argument: Interpreter.argument,
    ir.VarScopeBegin: Interpreter.scope_begin,
    ir.VarScopeEnd: Interpreter.scope_end,
    ir.CommitLazy: Interpreter.commit,
    ir.ConcatenateAndAppend: Interpreter.concatenate,
    ir.SeparateReasoning: Interpreter.separate_reasoning,
})  # fmt: skip
