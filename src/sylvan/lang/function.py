"""`@function`: turns a Python function over a state into a program to run, batch or trace."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from sylvan.lang.backends.api import BaseBackend
from sylvan.lang.backends.engine import EngineBackend
from sylvan.lang.chat_templates import MessageFormat, get_chat_template
from sylvan.lang.run import (
    GENERATOR_WINDOW,
    ProgramRun,
    run_batch,
    run_program,
    run_program_async,
)
from sylvan.lang.sampling import RUN_NAMES, run_defaults
from sylvan.lang.settings import global_config
from sylvan.lang.state import ProgramState
from sylvan.lang.tracer import (
    Traceable,
    TracerProgramState,
    current_tracer,
    extract_prefix,
    trace_program,
)

MIN_PREFIX_CHARS = 64  # a shorter common prefix is not worth a request

Bound = Mapping[str, Any]


def resolve_backend(backend: Any) -> BaseBackend:
    """The backend to run on: the given one, a `Runtime`'s endpoint, an engine, or the default.

    Raises:
        ValueError: none was given and there is no default.
        TypeError: it is none of these.
    """
    backend = global_config.default_backend if backend is None else backend
    backend = getattr(backend, "endpoint", backend)
    if backend is None:
        raise ValueError("Please specify a backend: run(backend=...) or set_default_backend(...)")
    if isinstance(backend, BaseBackend):
        return backend
    if hasattr(backend, "generate"):
        return EngineBackend(backend)
    raise TypeError(f"{type(backend).__name__} is not a backend")


@dataclass(frozen=True, slots=True)
class SglFunction:
    """A program.

    Keyword arguments of `run` and `run_batch` with names of sampling parameters (see
    `sampling.RUN_NAMES`) are defaults for the program's gens; others are arguments of the program.

    Args:
        func: Its body; the first parameter, named `s`, is the state. May be an `async def`.
        num_api_spec_tokens: Request this many tokens at a time from services without a cache, and
          serve several gens from one answer.
        timeout: Maximum seconds of a run.
        bind_arguments: Arguments already given.
    """

    func: Callable[..., Any]
    num_api_spec_tokens: int | None = None
    timeout: float | None = None
    bind_arguments: Bound = field(default_factory=lambda: MappingProxyType({}))

    def __post_init__(self) -> None:
        if not self._spec().args or self._spec().args[0] != "s":
            raise TypeError(f'the first parameter of {self.func.__name__}() must be named "s"')

    def _spec(self) -> inspect.FullArgSpec:
        return inspect.getfullargspec(self.func)

    @property
    def arg_names(self) -> list[str]:
        """Names of the program's arguments."""
        return self._spec().args[1:]

    @property
    def arg_defaults(self) -> tuple[Any, ...]:
        """Defaults of the last arguments."""
        return self._spec().defaults or ()

    def bind(self, **kwargs: Any) -> SglFunction:
        """The program with some arguments bound.

        Raises:
            TypeError: it has no such argument.
        """
        for name in kwargs:
            if name not in self.arg_names:
                raise TypeError(f"{self.func.__name__}() has no argument {name!r} to bind")
        return replace(self, bind_arguments=MappingProxyType({**self.bind_arguments, **kwargs}))

    def run(
        self,
        *args: Any,
        stream: bool = False,
        backend: Any = None,
        use_thread: bool = True,
        **kwargs: Any,
    ) -> ProgramState:
        """Run the program and wait for it; with `stream`, return at once.

        Reading the result of a failed gen raises its error; see `ProgramState.error`.

        Args:
            args: Arguments of the program.
            stream: Return results incrementally, through `text_iter` and `text_async_iter`.
            backend: Backend to run on; default: the default backend.
            use_thread: Execute nodes in the shared pool; otherwise where they are appended.
            kwargs: Sampling parameters and arguments of the program.
        """
        options, arguments = _split(kwargs)
        job = replace(self._job(backend, options), stream=stream, use_thread=use_thread)
        return run_program(job, args, arguments)

    async def async_run(self, *args: Any, backend: Any = None, **kwargs: Any) -> ProgramState:
        """Like `run`, without blocking the event loop."""
        options, arguments = _split(kwargs)
        return await run_program_async(self._job(backend, options), args, arguments)

    def run_batch(
        self,
        batch_kwargs: Sequence[Mapping[str, Any] | Sequence[Any]],
        *,
        backend: Any = None,
        num_threads: int | Literal["auto"] = "auto",
        progress_bar: bool = False,
        generator_style: bool = False,
        **options: Any,
    ) -> Any:
        """Run the program once for each set of arguments.

        If long enough, the common prefix of all runs is cached first.

        Args:
            batch_kwargs: Arguments of each run, by name or in order.
            backend: Where to run; the default backend if not given.
            num_threads: Number of programs to run at a time.
            progress_bar: Whether to show progress.
            generator_style: Return an iterator that starts programs as it is read.
            options: Sampling parameters, as for `run`.

        Returns:
            The states, in order.

        Raises:
            TypeError: a run's arguments do not fit the program, or an unknown option.
        """
        if not isinstance(batch_kwargs, list | tuple):
            raise TypeError("run_batch takes a list of arguments")
        defaults, unknown = _split(options)
        if unknown:
            raise TypeError(f"run_batch() got an unexpected keyword argument {min(unknown)!r}")
        batch = [self._by_name(arguments) for arguments in batch_kwargs]
        if not batch:
            return []
        job = self._job(backend, defaults)
        if global_config.enable_precache_with_tracing and len(batch) > 1:
            self.cache(job.backend)
        window = GENERATOR_WINDOW if generator_style else None
        states: Iterator[ProgramState] = run_batch(
            job, batch, num_threads, progress_bar=progress_bar, window=window
        )
        return states if generator_style else list(states)

    def trace(self, *, backend: Any = None, **kwargs: Any) -> TracerProgramState:
        """Record the nodes of a run with these arguments, without executing them."""
        return trace_program(self._traceable(), kwargs, _template(backend))

    def cache(self, backend: Any = None) -> None:
        """Let the backend cache the common prefix of all runs, if it is long enough."""
        backend = resolve_backend(backend)
        prefix = extract_prefix(self._traceable(), backend.get_chat_template())
        if len(prefix) > MIN_PREFIX_CHARS:
            backend.cache_prefix(prefix)

    def __call__(self, *args: Any, **kwargs: Any) -> ProgramState:
        """Run the program; while another program is traced, trace it too."""
        tracer = current_tracer()
        if tracer is None:
            return self.run(*args, **kwargs)
        arguments = {**dict(zip(self.arg_names, args, strict=False)), **_split(kwargs)[1]}
        return trace_program(self._traceable(), arguments, tracer.template)

    def _job(self, backend: Any, options: Mapping[str, Any]) -> ProgramRun:
        return ProgramRun(
            function=self.func,
            backend=resolve_backend(backend),
            defaults=run_defaults(options),
            num_api_spec_tokens=self.num_api_spec_tokens,
            timeout_s=self.timeout,
            bound=self.bind_arguments,
        )

    def _traceable(self) -> Traceable:
        return Traceable(self.func, self.arg_names, self.bind_arguments)

    def _by_name(self, arguments: Mapping[str, Any] | Sequence[Any]) -> dict[str, Any]:
        if isinstance(arguments, Mapping):
            return dict(arguments)
        names = self.arg_names
        least = len(names) - len(self.arg_defaults)
        if not isinstance(arguments, list | tuple) or not least <= len(arguments) <= len(names):
            raise TypeError(
                f"arguments {arguments!r} do not fit {self.func.__name__}(s, {', '.join(names)})"
            )
        return dict(zip(names, arguments, strict=False))


def _split(kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Sampling parameters, and the program's own arguments."""
    options = {name: value for name, value in kwargs.items() if name in RUN_NAMES}
    return options, {name: value for name, value in kwargs.items() if name not in RUN_NAMES}


def _template(backend: Any) -> MessageFormat:
    if backend is None and global_config.default_backend is None:
        return get_chat_template("default")
    return resolve_backend(backend).get_chat_template()
