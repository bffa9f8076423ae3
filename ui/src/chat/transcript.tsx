// The messages of one pane.
import { useEffect, useRef, useState } from "preact/hooks";
import { count, digits, many, seconds } from "../format";
import { Markdown } from "../markdown";
import { CopyButton, Icon, IconButton } from "../parts/controls";
import { type Thread, type ToolCall, type Turn, newId, showing, versions, way, withTurn } from "./model";
import { Tokens } from "./tokens";

interface Props {
  name: string;
  thread: Thread;
  busy: boolean;
  onThread: (thread: Thread) => void;
  onAnswer: (thread: Thread) => void;
}

const NEAR_PX = 80;

export function Transcript({ name, thread, busy, onThread, onAnswer }: Props) {
  const turns = way(thread);
  const box = useRef<HTMLDivElement>(null);
  const follows = useRef(true);
  const [away, setAway] = useState(false);
  useEffect(() => {
    if (follows.current) box.current!.scrollTop = box.current!.scrollHeight;
  });
  const scrolled = () => {
    const { scrollHeight, scrollTop, clientHeight } = box.current!;
    follows.current = scrollHeight - scrollTop - clientHeight < NEAR_PX;
    setAway(!follows.current);
  };
  const toEnd = () => {
    follows.current = true;
    setAway(false);
    box.current!.scrollTo({ top: box.current!.scrollHeight });
  };

  const edit = (turn: Turn, content: string) => {
    const changed: Turn = { ...turn, id: newId(), content, at: Date.now() };
    onAnswer(withTurn(thread, changed));
  };
  const retry = (turn: Turn) => onAnswer({ ...thread, leaf: turn.parent });
  const results = (turn: Turn, given: string[]) => {
    let next: Thread = thread;
    turn.calls!.forEach((call, i) => {
      next = withTurn(next, { id: newId(), parent: next.leaf, role: "tool", content: given[i]!, callId: call.id, state: "done", at: Date.now() });
    });
    onAnswer(next);
  };

  return (
    <section class="transcript" aria-label={name || "Messages"}>
      {name && <h2 class="pane-name">{name}</h2>}
      <div class="scroll" ref={box} onScroll={scrolled} tabIndex={0} role="log" aria-live="off" aria-label={name ? `Messages of ${name}` : "Messages"}>
        <ol class="turns">
          {turns.map((turn, i) => (
            <li key={turn.id} class={`turn ${turn.role}`} aria-label={{ user: "You", assistant: "Model", tool: "Result of a tool" }[turn.role]}>
              {turn.role === "user" ? (
                <Asked turn={turn} thread={thread} busy={busy} onEdit={(content) => edit(turn, content)} onThread={onThread} />
              ) : turn.role === "tool" ? (
                <div class="tool-result">
                  <span class="hint">Result</span>
                  <pre>{turn.content}</pre>
                </div>
              ) : (
                <Answered turn={turn} thread={thread} busy={busy} isLast={i === turns.length - 1} onRetry={() => retry(turn)} onThread={onThread} onResults={(given) => results(turn, given)} />
              )}
            </li>
          ))}
        </ol>
      </div>
      {away && (
        <button type="button" class="to-end" onClick={toEnd}>
          <Icon name="down" /> Newest
        </button>
      )}
    </section>
  );
}

function Versions({ turn, thread, onThread }: { turn: Turn; thread: Thread; onThread: (thread: Thread) => void }) {
  const all = versions(thread, turn);
  if (all.length < 2) return null;
  const at = all.findIndex((other) => other.id === turn.id);
  const go = (step: number) => onThread(showing(thread, all[at + step]!.id));
  return (
    <span class="versions">
      <IconButton icon="left" label="Earlier version" disabled={at === 0} onClick={() => go(-1)} />
      <span aria-label={`Version ${at + 1} of ${all.length}`}>
        {at + 1}/{all.length}
      </span>
      <IconButton icon="right" label="Later version" disabled={at === all.length - 1} onClick={() => go(1)} />
    </span>
  );
}

function focused(area: HTMLTextAreaElement | null): void {
  if (area && document.activeElement !== area) area.focus();
}

function Asked({ turn, thread, busy, onEdit, onThread }: { turn: Turn; thread: Thread; busy: boolean; onEdit: (content: string) => void; onThread: (thread: Thread) => void }) {
  const [draft, setDraft] = useState<string>();
  if (draft !== undefined) {
    const save = () => {
      setDraft(undefined);
      onEdit(draft.trim());
    };
    return (
      <form class="edit" onSubmit={(event) => (event.preventDefault(), save())}>
        <textarea
          aria-label="Edit message"
          rows={Math.min(10, draft.split("\n").length + 1)}
          ref={focused}
          value={draft}
          onInput={(event) => setDraft(event.currentTarget.value)}
          onKeyDown={(event) => {
            if (event.key === "Escape") setDraft(undefined);
            if (event.key === "Enter" && !event.shiftKey && !event.isComposing && draft.trim()) {
              event.preventDefault();
              save();
            }
          }}
        />
        <div class="buttons">
          <button type="button" class="button" onClick={() => setDraft(undefined)}>
            Cancel
          </button>
          <button type="submit" class="button main" disabled={!draft.trim() || busy}>
            Send
          </button>
        </div>
      </form>
    );
  }
  return (
    <>
      <div class="bubble">
        {turn.images?.map((image, i) => <img src={image} alt={`Picture ${i + 1}`} />)}
        {turn.content}
      </div>
      <div class="actions">
        <Versions turn={turn} thread={thread} onThread={onThread} />
        <IconButton icon="edit" label="Edit" disabled={busy} onClick={() => setDraft(turn.content)} />
        <CopyButton text={turn.content} label="Copy message" />
      </div>
    </>
  );
}

interface AnsweredProps {
  turn: Turn;
  thread: Thread;
  busy: boolean;
  isLast: boolean;
  onRetry: () => void;
  onThread: (thread: Thread) => void;
  onResults: (given: string[]) => void;
}

function Answered({ turn, thread, busy, isLast, onRetry, onThread, onResults }: AnsweredProps) {
  const [plain, setPlain] = useState(false);
  const streaming = turn.state === "streaming";
  const waits = streaming && !turn.content && !turn.reasoning && !turn.calls;
  const asTokens = !!turn.tokens && !plain;
  return (
    <>
      {turn.reasoning && (
        <details class="thinking" open={streaming && !turn.content}>
          <summary>{streaming && !turn.content ? "Thinking…" : "Thoughts"}</summary>
          <div class="thoughts">{turn.reasoning}</div>
        </details>
      )}
      {waits && (
        <p class="waiting">
          <span class="hidden">The model is working</span>
          <i />
          <i />
          <i />
        </p>
      )}
      {asTokens ? <Tokens tokens={turn.tokens!} /> : turn.content && <Markdown text={turn.content} />}
      {streaming && !waits && <span class="caret" aria-hidden="true" />}
      {turn.calls && <Calls calls={turn.calls} open={isLast && turn.state === "done" && !busy} onResults={onResults} />}
      {turn.state === "failed" && (
        <p class="notice bad" role="alert">
          <strong>No answer.</strong> {turn.error}
        </p>
      )}
      {!streaming && (
        <div class="actions">
          <Versions turn={turn} thread={thread} onThread={onThread} />
          <IconButton icon="retry" label="Try again" disabled={busy} onClick={onRetry} />
          <CopyButton text={turn.content} label="Copy answer" />
          {turn.tokens && (
            <button type="button" class="button tiny" aria-pressed={asTokens} onClick={() => setPlain(!plain)}>
              Tokens
            </button>
          )}
          <Footnote turn={turn} />
        </div>
      )}
    </>
  );
}

function Footnote({ turn }: { turn: Turn }) {
  const { stats } = turn;
  const ended = { stopped: "stopped", failed: "failed", streaming: "", done: turn.finish === "length" ? "cut at the longest length" : "" }[turn.state];
  if (!stats || turn.state === "failed") return ended ? <span class="footnote">{ended}</span> : null;
  const parts = [
    many(stats.outputTokens, "token"),
    stats.tokensPerS && `${count(stats.tokensPerS)} tokens/s`,
    stats.firstTokenS !== undefined && `first after ${seconds(stats.firstTokenS)}`,
    stats.cachedTokens > 0 && `${digits((100 * stats.cachedTokens) / stats.promptTokens).replace(/\.?0+$/, "")} % of ${count(stats.promptTokens)} prompt tokens cached`,
    ended,
  ].filter(Boolean);
  return (
    <span class="footnote">
      {parts.join(" · ")} ·{" "}
      <a href={`#/requests/${encodeURIComponent(stats.rid)}`} aria-label="Inspect this request">
        inspect
      </a>
    </span>
  );
}

function Calls({ calls, open, onResults }: { calls: ToolCall[]; open: boolean; onResults: (given: string[]) => void }) {
  const [given, setGiven] = useState<string[]>(() => calls.map(() => ""));
  const ready = calls.every((_, i) => given[i]?.trim());
  return (
    <form class="calls" onSubmit={(event) => (event.preventDefault(), ready && onResults(given))}>
      {calls.map((call, i) => (
        <div class="call">
          <p class="call-name">
            Calls <code>{call.name}</code>
          </p>
          <pre tabIndex={0} aria-label={`Arguments of ${call.name}`}>
            {pretty(call.arguments)}
          </pre>
          {open && (
            <>
              <label for={`${call.id}-result`}>Result for the model</label>
              <textarea id={`${call.id}-result`} rows={2} class="mono" value={given[i]} onInput={(event) => setGiven(calls.map((_, j) => (j === i ? event.currentTarget.value : (given[j] ?? ""))))} />
            </>
          )}
        </div>
      ))}
      {open && (
        <div class="buttons">
          <button type="submit" class="button main" disabled={!ready}>
            Send {calls.length > 1 ? "results" : "result"}
          </button>
        </div>
      )}
    </form>
  );
}

function pretty(text: string): string {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // still coming
  }
}
