"""Sessions: trees of past turns, from which prompts of further turns are built.

Only token IDs are kept here. KV of past turns is in the prefix cache like that of any
other prompt, so a forgotten session uses no device memory.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np

from sylvan.api.native import OpenSessionBody, SessionParams
from sylvan.protocol.arrays import EMPTY_IDS, IntArray
from sylvan.protocol.errors import CapacityError, RequestError, SylvanError
from sylvan.utils.clock import Clock

RID = "session_params.rid"


@dataclass(frozen=True, kw_only=True, slots=True)
class SessionLimits:
    """Limits per tenant; beyond them, the longest idle sessions are closed.

    Attributes:
        sessions: Open sessions.
        turns: Turns of one session.
        tokens: Tokens of all turns of all sessions.
        rest_s: Idle time after which a session is closed.
    """

    sessions: int = 1024
    turns: int = 4096
    tokens: int = 1 << 24
    rest_s: float = math.inf


@dataclass(slots=True, eq=False)
class Turn:
    """One request of a session; a node of its tree.

    Attributes:
        rid: Request ID; names this node.
        prompt: The whole prompt.
        max_new_tokens: As the client set it.
        output: Output generated and delivered so far.
        running: Whether it is still running.
    """

    rid: str
    prompt: IntArray
    max_new_tokens: int | None
    session: Session
    parent: Turn | None
    children: list[Turn] = field(default_factory=list["Turn"])
    output: list[int] = field(default_factory=list[int])
    running: bool = True

    @property
    def num_tokens(self) -> int:
        """Number of tokens it holds."""
        return len(self.prompt) + len(self.output)

    def history(self, *, with_output: bool) -> IntArray:
        """Return the tokens that a following turn starts with."""
        if not with_output:
            return self.prompt
        output = np.array(self.output[: self.max_new_tokens], np.int32)
        return np.concatenate((self.prompt, output))


@dataclass(slots=True, eq=False)
class Session:
    """A tree of turns.

    Attributes:
        tenant: Its tenant.
        capacity_of_str_len: As the client set it; has no effect.
        timeout_s: Idle time after which it is closed.
        streaming: Turns are strictly sequential; only the last one is kept.
        turns: By request ID; roots have no parent.
        used_s: Time of the last use.
        num_running: Running turns.
        num_tokens: Tokens of all turns.
    """

    tenant: str
    capacity_of_str_len: int
    timeout_s: float
    used_s: float
    streaming: bool = False
    turns: dict[str, Turn] = field(default_factory=dict[str, Turn])
    num_running: int = 0
    num_tokens: int = 0

    def add(self, turn: Turn) -> None:
        """Add a running turn."""
        self.turns[turn.rid] = turn
        self.num_running += 1
        self.num_tokens += turn.num_tokens
        if turn.parent is not None:
            turn.parent.children.append(turn)

    def stop_running(self, turn: Turn) -> None:
        """Mark a turn as not running."""
        self.num_running -= turn.running
        turn.running = False

    def remove(self, turn: Turn) -> None:
        """Remove a turn; its children were removed before."""
        self.stop_running(turn)
        if self.turns.get(turn.rid) is turn:
            del self.turns[turn.rid]
            self.num_tokens -= turn.num_tokens
        if turn.parent is not None:
            turn.parent.children.remove(turn)
            turn.parent = None


@dataclass(frozen=True, kw_only=True, slots=True)
class NewTurn:
    """A turn to add.

    Attributes:
        rid: Request ID.
        ids: New part of the prompt; may be empty if there is a history.
        max_new_tokens: As the client set it.
    """

    rid: str
    ids: Sequence[int]
    max_new_tokens: int | None = None


class SessionStore:
    """The sessions of all tenants, isolated from each other.

    Args:
        abort: Aborts a tenant's live request with that ID, if there is one.
        bos_id: Token that starts a prompt; dropped where a prompt continues.
    """

    def __init__(
        self,
        abort: Callable[[str, str], object],
        bos_id: int | None,
        clock: Clock,
        limits: SessionLimits | None = None,
    ) -> None:
        self._abort = abort
        self._bos_id = bos_id
        self._clock = clock
        self._limits = limits or SessionLimits()
        self._tenants: dict[str, dict[str, Session]] = {}

    def open(self, tenant: str, wanted: OpenSessionBody) -> str:
        """Open a session; return its ID.

        Raises:
            RequestError: The ID is taken.
            CapacityError: All other sessions of the tenant are busy.
        """
        assert wanted.capacity_of_str_len is not None, "checked by the route"
        sessions = self._sessions(tenant)
        name = wanted.session_id or secrets.token_hex(16)
        if name in sessions:
            message = f"session_id: there is a session {name!r} already."
            raise RequestError(message, param="session_id")
        if len(sessions) >= self._limits.sessions:
            message = f"{len(sessions)} sessions are open and in use (limits.sessions)."
            self._close_oldest(sessions, None, message, "limits.sessions")
        streaming = bool(wanted.streaming)
        capacity = wanted.capacity_of_str_len
        rest_s = self._limits.rest_s if wanted.timeout is None else wanted.timeout
        rest_s = min(rest_s, self._limits.rest_s)
        made = Session(tenant, capacity, rest_s, self._clock(), streaming)
        sessions[name] = made
        return name

    def close(self, tenant: str, name: str) -> bool:
        """Close a session and abort its requests; return whether there was one."""
        sessions = self._sessions(tenant)
        if name not in sessions:
            return False
        self._clear(sessions.pop(name))
        return True

    def begin(self, tenant: str, params: SessionParams, new: NewTurn) -> Turn:
        """Return the prompt of a new turn, which runs until it is ended.

        Raises:
            RequestError: The session, or the turn to continue, does not exist.
            CapacityError: The tenant's sessions are full.
        """
        sessions = self._sessions(tenant)
        session = sessions.get(params.id or "")
        if session is None:
            message = f"session_params.id: there is no session {params.id!r}; open it first."
            raise RequestError(message, param="session_params.id")
        parent = _latest(session, params) if session.streaming else self._parent(session, params)
        if params.replace and parent is not None:
            self._stop(parent)
        prompt = self._prompt(parent, params, new.ids)
        if params.replace:
            self._prune(session, parent)
        if new.rid in session.turns:
            message = f"rid: the session has a turn {new.rid!r} already."
            raise RequestError(message, param="rid")
        if len(session.turns) >= self._limits.turns:
            message = f"session_params.id: the session has {len(session.turns)} turns, the limit."
            raise RequestError(message, param="session_params.id")
        self._make_room(sessions, session, len(prompt))
        turn = Turn(new.rid, prompt, new.max_new_tokens, session, parent)
        session.add(turn)
        session.used_s = self._clock()
        return turn

    def extend(self, turn: Turn, ids: Sequence[int]) -> None:
        """Append generated output; a turn that was replaced is unchanged."""
        if turn.running:
            turn.output.extend(ids)
            turn.session.num_tokens += len(ids)

    def end(self, turn: Turn, *, aborted: bool = False) -> None:
        """End a turn, which later turns can continue; in a streaming session not if it was aborted.

        There the next turn continues the one before, as in SGLang's sessions.
        """
        session = turn.session
        if aborted and session.streaming:
            self.drop(turn)
            return
        session.stop_running(turn)
        session.used_s = self._clock()
        if session.streaming and session.turns.get(turn.rid) is turn:  # contains all before it
            for other in [t for t in session.turns.values() if t is not turn]:
                session.remove(other)
            turn.parent = None

    def drop(self, turn: Turn) -> None:
        """Remove a turn whose request was rejected."""
        turn.session.remove(turn)

    @contextmanager
    def recorded(self, turn: Turn | None) -> Iterator[None]:
        """End the turn when the context exits, in any way; no-op without one."""
        if turn is None:
            yield
            return
        try:
            yield
        except SylvanError:
            self.drop(turn)
            raise
        finally:
            if turn.running:  # its client disconnected
                self.end(turn, aborted=True)

    def _sessions(self, tenant: str) -> dict[str, Session]:
        """Return the tenant's sessions that have not expired."""
        sessions = self._tenants.setdefault(tenant, {})
        now = self._clock()
        late = [
            name
            for name, session in sessions.items()
            if now - session.used_s >= session.timeout_s and not session.num_running
        ]
        for name in late:
            self._clear(sessions.pop(name))
        return sessions

    def _parent(self, session: Session, params: SessionParams) -> Turn | None:
        if params.rid is None:
            return None
        parent = session.turns.get(params.rid)
        if parent is None:
            raise RequestError(f"{RID}: the session has no turn {params.rid!r}.", param=RID)
        if parent.running and not params.replace:
            raise RequestError(f"{RID}: the turn {params.rid!r} has not finished.", param=RID)
        return parent

    def _prompt(self, parent: Turn | None, params: SessionParams, new: Sequence[int]) -> IntArray:
        history = EMPTY_IDS
        if parent is not None:
            history = parent.history(with_output=not params.drop_previous_output)
            history = history[: params.offset] if params.offset else history
        if len(history) and len(new) and new[0] == self._bos_id:
            new = new[1:]
        prompt = np.concatenate((history, np.asarray(new, np.int32)))
        if not len(prompt):
            message = "input_ids must not be empty: the session has no history to continue."
            raise RequestError(message, param="input_ids")
        return prompt

    def _prune(self, session: Session, parent: Turn | None) -> None:
        """Remove replaced turns."""
        if parent is None:
            self._clear(session)
            return
        doomed = list(parent.children)
        for turn in doomed:  # grows during the loop
            doomed += turn.children
        for turn in reversed(doomed):
            self._stop(turn)
            session.remove(turn)

    def _clear(self, session: Session) -> None:
        for turn in reversed(tuple(session.turns.values())):  # parents are older
            self._stop(turn)
            session.remove(turn)

    def _stop(self, turn: Turn) -> None:
        if turn.running:
            turn.session.stop_running(turn)
            self._abort(turn.rid, turn.session.tenant)

    def _make_room(self, sessions: dict[str, Session], keep: Session, more: int) -> None:
        """Close the longest idle sessions until `more` tokens fit."""
        limit = self._limits.tokens
        if keep.num_tokens + more > limit:
            raise RequestError(
                f"session_params.id: the session would hold more than {limit} tokens "
                "(limits.session_tokens).",
                param="session_params.id",
                setting="limits.session_tokens",
            )
        held = more + sum(session.num_tokens for session in sessions.values())
        while held > limit:
            message = f"Sessions hold {held} tokens; {limit} would fit (limits.session_tokens)."
            held -= self._close_oldest(sessions, keep, message, "limits.session_tokens")

    def _close_oldest(
        self, sessions: dict[str, Session], keep: Session | None, otherwise: str, setting: str
    ) -> int:
        """Close the longest idle session; return how many tokens it held.

        Raises:
            CapacityError: All are busy; the message is `otherwise`.
        """
        idle = [n for n, s in sessions.items() if s is not keep and not s.num_running]
        if not idle:
            raise CapacityError(otherwise, setting=setting)
        name = min(idle, key=lambda n: sessions[n].used_s)
        oldest = sessions.pop(name)
        num_tokens = oldest.num_tokens
        self._clear(oldest)
        return num_tokens


def _latest(session: Session, params: SessionParams) -> Turn | None:
    """Return the turn that the next one of a streaming session continues.

    Raises:
        RequestError: It is still running, or the client asked for something other than to continue.
    """
    latest = next(reversed(session.turns.values()), None)
    if latest is not None and latest.running:
        message = "session_params.id: the turn before has not finished."
        raise RequestError(message, param="session_params.id")
    for name in ("offset", "replace", "drop_previous_output"):
        if getattr(params, name):
            message = f"session_params.{name}: a streaming session is strictly sequential."
            raise RequestError(message, param=f"session_params.{name}")
    if params.rid is not None and (latest is None or params.rid != latest.rid):
        message = f"{RID}: the last turn of the session is not {params.rid!r}."
        raise RequestError(message, param=RID)
    return latest
