"""Shows progress on the terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from sylvan.config.fields import size_text


@contextmanager
def loading(text: str) -> Iterator[None]:
    """Show a spinner, if stdout is a terminal."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        progress.add_task(text, total=None)
        yield


@contextmanager
def starting(text: str, *, quiet: bool) -> Iterator[Callable[[int, int], None] | None]:
    """Like `counting`, but removed at the end; None without a terminal."""
    if quiet or not sys.stderr.isatty():
        yield None
        return
    with _bar(text, transient=True) as progress:
        yield progress


@contextmanager
def counting(text: str) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar, if stdout is a terminal; call the result with (done, total)."""
    if not sys.stderr.isatty():
        yield lambda done, total: None
        return
    with _bar(text) as progress:
        yield progress


@contextmanager
def counting_requests() -> Iterator[Callable[[int, int], None]]:
    """Show the number of finished requests: a bar, or a line per tenth without a terminal."""
    if not sys.stderr.isatty():
        yield _tenths("requests", str)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=Console(stderr=True), transient=True) as p:
        task = p.add_task("requests", total=None)
        yield lambda done, total: p.update(task, completed=done, total=total)


@contextmanager
def _bar(text: str, *, transient: bool = False) -> Iterator[Callable[[int, int], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
    console = Console(stderr=True)
    with Progress(
        *columns, TimeRemainingColumn(), console=console, transient=transient
    ) as progress:
        task = progress.add_task(text, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


@contextmanager
def fetching(text: str) -> Iterator[Callable[[int, int], None]]:
    """Like `counting`, but prints lines without a terminal, because copying may take long."""
    if sys.stderr.isatty():
        with counting(text) as progress:
            yield progress
        return
    yield _tenths(text, size_text)


def _tenths(text: str, shown: Callable[[int], str]) -> Callable[[int, int], None]:
    """Prints a line per tenth; starts over when the count decreases."""
    tenths = -1

    def show(done: int, total: int) -> None:
        nonlocal tenths
        now = 10 * done // total if total else 0
        if now != tenths:
            tenths = now
            of = f" of {shown(total)}" if total else ""
            print(f"{text}: {shown(done)}{of}", file=sys.stderr, flush=True)

    return show
