// An answer token by token: the probability of each, and its alternatives.
import { useRef, useState } from "preact/hooks";
import { percent } from "../format";
import type { TokenInfo } from "./model";

export function Tokens({ tokens }: { tokens: TokenInfo[] }) {
  const [at, setAt] = useState<number>();
  const [place, setPlace] = useState({ left: 0, top: 0 });
  const box = useRef<HTMLDivElement>(null);

  const show = (index: number) => {
    const span = box.current!.querySelector<HTMLElement>(`[data-i="${index}"]`);
    if (!span) return;
    const frame = box.current!.getBoundingClientRect();
    const spot = span.getClientRects()[0] ?? span.getBoundingClientRect();
    setPlace({ left: Math.max(0, Math.min(spot.left - frame.left, frame.width - 230)), top: spot.bottom - frame.top + 6 });
    setAt(index);
  };
  const pointed = (event: Event) => {
    const index = (event.target as HTMLElement).dataset?.i;
    if (index !== undefined) show(Number(index));
  };
  const keyed = (event: KeyboardEvent) => {
    const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (event.key === "Escape") setAt(undefined);
    if (!step) return;
    event.preventDefault();
    show(Math.max(0, Math.min(tokens.length - 1, (at ?? -1) + step)));
  };
  const chosen = at === undefined ? undefined : tokens[at];
  return (
    <div class="tokens" ref={box}>
      <div
        class="token-text"
        tabIndex={0}
        role="application"
        aria-roledescription="answer by tokens"
        aria-label="Answer by its tokens. Arrow keys go from token to token."
        aria-describedby={chosen ? "token-card" : undefined}
        onPointerOver={pointed}
        onPointerLeave={() => setAt(undefined)}
        onFocus={() => at === undefined && show(0)}
        onBlur={() => setAt(undefined)}
        onKeyDown={keyed}
      >
        {tokens.map((token, i) => (
          <span class={i === at ? "token at" : "token"} data-i={i} data-p={level(token.logprob)}>
            {token.token}
          </span>
        ))}
      </div>
      {chosen && (
        <div class="token-card" id="token-card" role="status" style={{ left: `${place.left}px`, top: `${place.top}px` }}>
          <p>
            <code>{visible(chosen.token)}</code> {percent(Math.exp(chosen.logprob))}
          </p>
          <ul>
            {chosen.top.map((other) => (
              <li class={other.token === chosen.token ? "is-chosen" : ""}>
                <code>{visible(other.token)}</code>
                <span class="bar">
                  <span style={{ width: `${100 * Math.exp(other.logprob)}%` }} />
                </span>
                <span class="share">{percent(Math.exp(other.logprob))}</span>
              </li>
            ))}
          </ul>
        </div>
      )}
    </div>
  );
}

/** The colour class of a probability, from 0 (certain) to 4 (surprising). */
function level(logprob: number): number {
  const p = Math.exp(logprob);
  return p >= 0.9 ? 0 : p >= 0.6 ? 1 : p >= 0.3 ? 2 : p >= 0.1 ? 3 : 4;
}

function visible(token: string): string {
  return token.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "␣") || "∅";
}
