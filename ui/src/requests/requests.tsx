// Recent requests: the time of each stage, and the cached part of the prompt.
import { useMemo, useState } from "preact/hooks";
import { ApiError, json, key } from "../api";
import { clock, count, percent, seconds } from "../format";
import { Card, Empty, Icon, IconButton, Notice, Page } from "../parts/controls";
import { type Span, spansIn, Waterfall } from "../parts/spans";
import { STAGES } from "../parts/stages";
import { usePoll, useStore } from "../store";
import { own, type OwnRequest } from "./own";

interface Past {
  rid: string;
  tenant?: string;
  kind?: string;
  arrived: number;
  samples?: number;
  prompt_tokens: number;
  completion_tokens: number;
  cached_tokens: { device: number; host: number; storage: number };
  retractions?: number;
  finish: string;
  adapter?: string | null;
  stages: Record<string, number>;
  mine?: boolean;
}

interface Running {
  rid: string;
  tenant: string;
  age_s: number;
  prompt_tokens: number;
  completion_tokens: number;
}

interface Recent {
  running: Running[];
  requests: Past[];
}

const FINISH: Record<string, string> = { stop: "stopped", length: "length", tool_calls: "called a tool", abort_client: "client left", abort_server: "ended by the server", stopped: "stopped here", failed: "failed" };

export function Requests({ rest }: { rest: string }) {
  const has = useStore(key);
  const mine = useStore(own);
  const [wanted, setWanted] = useState("");
  const recent = usePoll(() => json<Recent>("/requests?limit=100"), 3000, [has]);
  const rows = useMemo(() => merged(recent.data?.requests ?? [], mine), [recent.data, mine]);
  const chosen = rows.find(({ rid }) => rid === rest);
  const choose = (rid: string) => (location.hash = `#/requests/${encodeURIComponent(rid)}`);
  const told = recent.error instanceof ApiError && [403, 404, 501].includes(recent.error.status);
  return (
    <Page
      title="Requests"
      tools={
        <form class="search" role="search" onSubmit={(event) => (event.preventDefault(), wanted.trim() && choose(wanted.trim()))}>
          <input type="search" aria-label="Name of a request (rid)" placeholder="rid of a request" value={wanted} onInput={(event) => setWanted(event.currentTarget.value)} />
          <button type="submit" class="icon-button" aria-label="Find the request" title="Find the request">
            <Icon name="search" />
          </button>
        </form>
      }
    >
      {told && <p class="hint">Only requests of this page are known here; look others up by their name.</p>}
      {recent.error && !told && !(recent.error instanceof ApiError && recent.error.status === 0) && <Notice error={recent.error} what="The list of requests" />}
      {rest && <Inspector rid={rest} past={chosen} onClose={() => (location.hash = "#/requests")} />}
      {recent.data && recent.data.running.length > 0 && <UnderWay rows={recent.data.running} onChoose={choose} />}
      {rows.length ? (
        <Table rows={rows} chosen={rest} onChoose={choose} tenants={rows.some(({ tenant }) => tenant)} />
      ) : (
        !rest && (
          <Empty title="No request has ended yet">
            <p>
              Say something in the <a href="#/chat">chat</a>, or send a request of your own.
            </p>
          </Empty>
        )
      )}
    </Page>
  );
}

/** Requests that the server lists, and other requests of this page. */
function merged(told: Past[], mine: OwnRequest[]): Past[] {
  const names = new Set(mine.map(({ rid }) => rid));
  const known = new Set(told.map(({ rid }) => rid));
  const rows = told.map((past) => ({ ...past, mine: names.has(past.rid) }));
  const others = mine.filter(({ rid }) => !known.has(rid)).map(asPast);
  return [...rows, ...others].sort((a, b) => b.arrived - a.arrived);
}

/** The times of a request, from its answer or measured here. */
function asPast(request: OwnRequest): Past {
  const { queueS, firstTokenS, totalS } = request;
  const stages: Record<string, number> = {};
  if (queueS !== undefined) stages.prefill_waiting = queueS;
  if (firstTokenS !== undefined) {
    stages.prefill_forward = Math.max(0, firstTokenS - (queueS ?? 0));
    stages.decode_forward = Math.max(0, totalS - firstTokenS);
  } else stages.network = totalS;
  return {
    rid: request.rid,
    arrived: request.at,
    prompt_tokens: request.promptTokens,
    completion_tokens: request.outputTokens,
    cached_tokens: { device: request.cachedTokens, host: 0, storage: 0 },
    finish: request.finish,
    stages,
    mine: true,
  };
}

function total(past: Past): number {
  return Object.values(past.stages).reduce((sum, each) => sum + each, 0);
}

function cached(past: Past): number {
  const { device, host, storage } = past.cached_tokens;
  return device + host + storage;
}

function Table({ rows, chosen, onChoose, tenants }: { rows: Past[]; chosen: string; onChoose: (rid: string) => void; tenants: boolean }) {
  return (
    <Card title="Newest" aside={<Key />}>
      <div class="table-scroll" tabIndex={0} role="region" aria-label="Newest requests">
        <table class="plain-table requests">
          <thead>
            <tr>
              <th scope="col">Arrived</th>
              <th scope="col">Request</th>
              {tenants && <th scope="col">Tenant</th>}
              <th scope="col" class="number">Prompt</th>
              <th scope="col" class="number">Cached</th>
              <th scope="col" class="number">Output</th>
              <th scope="col">Ended</th>
              <th scope="col" class="number">Time</th>
              <th scope="col" class="stage-column">
                <span class="hidden">Stages</span>
              </th>
            </tr>
          </thead>
          <tbody>
            {rows.map((past) => (
              <tr class={past.rid === chosen ? "chosen" : ""}>
                <td class="quiet">{clock(past.arrived)}</td>
                <th scope="row">
                  <button type="button" class="link" onClick={() => onChoose(past.rid)} title={past.rid}>
                    <span class="hidden">Inspect </span>
                    {past.rid}
                  </button>
                  {past.mine && <span class="badge">this page</span>}
                </th>
                {tenants && <td>{past.tenant || "–"}</td>}
                <td class="number">{count(past.prompt_tokens)}</td>
                <td class="number">{past.prompt_tokens ? percent(cached(past) / past.prompt_tokens) : "–"}</td>
                <td class="number">{count(past.completion_tokens)}</td>
                <td class={past.finish.startsWith("abort") || past.finish === "failed" ? "bad-text" : ""}>{FINISH[past.finish] ?? past.finish}</td>
                <td class="number">{seconds(total(past))}</td>
                <td class="stage-column">
                  <StageBar stages={past.stages} />
                </td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Card>
  );
}

function Key() {
  return (
    <span class="legend" aria-hidden="true">
      {Object.values(STAGES).map(([name, , color]) => (
        <span class={`c${color}`}>
          <i /> {name}
        </span>
      ))}
    </span>
  );
}

function StageBar({ stages }: { stages: Record<string, number> }) {
  const all = Math.max(1e-9, Object.values(stages).reduce((sum, each) => sum + each, 0));
  return (
    <div class="meter thin" aria-hidden="true">
      {Object.entries(stages).map(([name, value]) => (
        <span class={`c${STAGES[name]?.[2] ?? 5}`} style={{ width: `${(100 * value) / all}%` }} />
      ))}
    </div>
  );
}

function UnderWay({ rows, onChoose }: { rows: Running[]; onChoose: (rid: string) => void }) {
  return (
    <Card title="Under way" aside={<span class="hint">{count(rows.length)}</span>}>
      <ul class="under-way">
        {rows.slice(0, 24).map((row) => (
          <li>
            <button type="button" class="link" onClick={() => onChoose(row.rid)}>
              {row.rid.slice(0, 20)}
            </button>
            <span class="hint">
              {row.tenant && `${row.tenant}, `}
              {count(row.prompt_tokens)} → {count(row.completion_tokens)} tokens, {seconds(row.age_s)}
            </span>
          </li>
        ))}
      </ul>
    </Card>
  );
}

interface Explained {
  prompt_tokens: number;
  cached_tokens: number;
  tiers: Record<string, number>;
  reason: string;
  divergence: { position: number; ours_text: string; theirs_text: string };
}

const REASONS: Record<string, string> = {
  all_cached: "All of the prompt that can be cached was cached.",
  never_seen: "No earlier prompt continued in this way.",
  evicted: "This part was cached, but has been evicted.",
  other_namespace: "This part is cached, but for another owner, salt or adapter: it must not be shared.",
};

function Inspector({ rid, past, onClose }: { rid: string; past?: Past; onClose: () => void }) {
  const has = useStore(key);
  const ended = past !== undefined;
  const why = usePoll(() => json<Explained>(`/cache/explain?rid=${encodeURIComponent(rid)}`), 0, [rid, ended, has]);
  const trace = usePoll(() => traceOf(rid), 0, [rid, ended, has]);
  const traced = trace.data?.length ? trace.data : undefined;
  const all = past ? Math.max(total(past), 1e-9) : 1;
  let at = 0;
  return (
    <Card title="Request" aside={<IconButton icon="close" label="Close the request" onClick={onClose} />} class="inspector">
      <p class="rid">
        <code>{rid}</code>
      </p>
      {past ? (
        <>
          <dl class="facts">
            <Fact name="arrived" value={clock(past.arrived)} />
            <Fact name="took" value={seconds(total(past))} />
            <Fact name="prompt" value={`${count(past.prompt_tokens)} tokens`} />
            <Fact name="output" value={`${count(past.completion_tokens)} tokens`} />
            <Fact name="ended" value={FINISH[past.finish] ?? past.finish} />
            {past.tenant ? <Fact name="tenant" value={past.tenant} /> : null}
            {past.samples && past.samples > 1 ? <Fact name="answers" value={count(past.samples)} /> : null}
            {past.retractions ? <Fact name="preempted" value={`${past.retractions} times`} /> : null}
            {past.adapter ? <Fact name="adapter" value={past.adapter} /> : null}
          </dl>
          {!traced && <h3>Where the time went</h3>}
          {!traced && (
          <ol class="waterfall" aria-label="Stages">
            {Object.entries(past.stages).map(([name, value]) => {
              const left = at;
              at += value;
              return (
                <li>
                  <span class="span-name" title={STAGES[name]?.[1]}>
                    {STAGES[name]?.[0] ?? name} <small>{STAGES[name]?.[1]}</small>
                  </span>
                  <span class="span-lane">
                    <span class={`span-bar c${STAGES[name]?.[2] ?? 5}`} style={{ left: `${(100 * left) / all}%`, width: `max(2px, ${(100 * value) / all}%)` }} />
                  </span>
                  <span class="span-time">{seconds(value)}</span>
                </li>
              );
            })}
          </ol>
          )}
        </>
      ) : (
        <p class="hint">It is not among the newest requests that have ended.</p>
      )}
      {traced && (
        <>
          <h3>Where the time went</h3>
          <Waterfall spans={traced} label="Spans of the trace" />
        </>
      )}
      <h3>What it found in the cache</h3>
      {why.data ? <Explanation told={why.data} /> : why.error ? <p class="hint">{why.error instanceof ApiError && why.error.status === 404 ? "The server no longer knows its prompt." : why.error.message}</p> : <p class="loading">Asking the server…</p>}
    </Card>
  );
}

let untraced = false; // this server has no traces

async function traceOf(rid: string): Promise<Span[]> {
  if (untraced) return [];
  try {
    return spansIn(await json(`/trace/${encodeURIComponent(rid)}`));
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    untraced = error.status === 501 || (error.status === 404 && error.message.startsWith("Not Found"));
    return []; // it was not traced, or is not known any more
  }
}

function Fact({ name, value }: { name: string; value: string }) {
  return (
    <div>
      <dt>{name}</dt>
      <dd>{value}</dd>
    </div>
  );
}

function Explanation({ told }: { told: Explained }) {
  const share = told.prompt_tokens ? told.cached_tokens / told.prompt_tokens : 0;
  const tiers = Object.entries(told.tiers).filter(([, tokens]) => tokens > 0);
  return (
    <div class="explanation">
      <div class="meter tall" role="img" aria-label={`${percent(share)} of the prompt was cached`}>
        {tiers.map(([, tokens], i) => (
          <span class={`c${[1, 2, 4][i] ?? 5}`} style={{ width: `${(100 * tokens) / Math.max(1, told.prompt_tokens)}%` }} />
        ))}
      </div>
      <p>
        <strong>
          {count(told.cached_tokens)} of {count(told.prompt_tokens)} prompt tokens
        </strong>{" "}
        were cached{tiers.length > 0 ? ` (${tiers.map(([name, tokens]) => `${name} ${count(tokens)}`).join(", ")})` : ""}. {REASONS[told.reason] ?? told.reason}
      </p>
      {told.reason !== "all_cached" && (
        <div class="apart">
          <div>
            <h4>It went on, at token {count(told.divergence.position)}</h4>
            <pre tabIndex={0}>{told.divergence.ours_text || "(its end)"}</pre>
          </div>
          <div>
            <h4>Cached there instead</h4>
            <pre tabIndex={0}>{told.divergence.theirs_text || "(nothing)"}</pre>
          </div>
        </div>
      )}
    </div>
  );
}
