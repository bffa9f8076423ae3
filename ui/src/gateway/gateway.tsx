// The workers behind a gateway: their health and load.
import { json, key } from "../api";
import { count, percent } from "../format";
import type { LoadRow } from "../dashboard/dashboard";
import { Card, Empty, Notice, Page } from "../parts/controls";
import { usePoll, useStore } from "../store";

interface Worker {
  id: string;
  url: string;
  is_healthy: boolean;
  models?: string[];
  worker_type?: string;
  is_draining?: boolean;
  load?: number;
  queued_tokens?: number;
  circuit_breaker?: string;
  connection_mode?: string;
  runtime_type?: string;
  cache_tokens?: number | null;
  priority?: number;
  dp_rank?: number | null;
  continues_streams?: boolean;
  metadata?: Record<string, string>;
  job_status?: { status?: string; job_type?: string; message?: string | null } | null;
}

interface Workers {
  workers: Worker[];
  total: number;
}

const BREAKERS: Record<string, [string, string]> = {
  closed: ["closed", "good"],
  half_open: ["half open", "warn"],
  "half-open": ["half open", "warn"],
  open: ["open", "bad"],
};

export function Gateway() {
  const has = useStore(key);
  const workers = usePoll(() => json<Workers>("/workers"), 3000, [has]);
  const loads = usePoll(() => json<{ loads: LoadRow[] }>("/v1/loads"), 3000, [has]);
  if (!workers.data) return <Page title="Gateway">{workers.error ? <Notice error={workers.error} what="The list of workers" /> : <p class="loading">Asking the gateway…</p>}</Page>;
  const all = workers.data.workers;
  const rows = (worker: Worker) => (loads.data?.loads ?? []).filter((row) => row.worker === worker.url);
  const healthy = all.filter((worker) => worker.is_healthy).length;
  const open = all.filter((worker) => worker.circuit_breaker && worker.circuit_breaker !== "closed").length;
  const most = Math.max(1, ...all.map((worker) => worker.load ?? 0));
  return (
    <Page title="Gateway">
      {workers.error && <Notice error={workers.error} what="The list of workers" />}
      <div class="tiles">
        <Tile name="Workers" value={`${healthy} of ${all.length}`} unit="healthy" alarm={healthy < all.length} />
        <Tile name="Breakers" value={count(open)} unit="open or half open" alarm={open > 0} />
        <Tile name="Under way" value={count(all.reduce((sum, worker) => sum + (worker.load ?? 0), 0))} unit="requests" />
        <Tile name="Queued" value={count(all.reduce((sum, worker) => sum + (worker.queued_tokens ?? 0), 0))} unit="prompt tokens" />
      </div>
      {!all.length && (
        <Empty title="There are no workers">
          <p>
            Start a server with <code>--server.register</code> and the address of this gateway, or add one with <code>POST /workers</code>.
          </p>
        </Empty>
      )}
      <ul class="workers">
        {all.map((worker) => (
          <li>
            <WorkerCard worker={worker} rows={rows(worker)} most={most} />
          </li>
        ))}
      </ul>
    </Page>
  );
}

function Tile({ name, value, unit, alarm }: { name: string; value: string; unit: string; alarm?: boolean }) {
  return (
    <div class={`tile ${alarm ? "alarm" : ""}`}>
      <p class="tile-name">{name}</p>
      <p class="tile-value">{value}</p>
      <p class="tile-unit">{unit}</p>
    </div>
  );
}

function WorkerCard({ worker, rows, most }: { worker: Worker; rows: LoadRow[]; most: number }) {
  const [breaker, mood] = BREAKERS[worker.circuit_breaker ?? ""] ?? [worker.circuit_breaker ?? "unknown", ""];
  const add = (name: keyof LoadRow) => rows.reduce((sum, row) => sum + (Number(row[name]) || 0), 0);
  const capacity = add("max_total_num_tokens");
  const health = worker.is_draining ? "draining" : worker.is_healthy ? "healthy" : "not healthy";
  const told: [string, string | undefined][] = [
    ["kind", worker.worker_type],
    ["models", worker.models?.join(", ")],
    ["by", worker.connection_mode],
    ["version", worker.metadata?.version],
    ["priority", worker.priority === undefined ? undefined : String(worker.priority)],
    ["cache", worker.cache_tokens ? `${count(worker.cache_tokens)} tokens` : undefined],
    ["streams", worker.continues_streams === undefined ? undefined : worker.continues_streams ? "continue if it is lost" : "end if it is lost"],
  ];
  const facts = told.filter(([, value]) => value);
  return (
    <Card
      title={worker.url}
      class="worker"
      aside={
        <span class="pills">
          <span class={`pill ${worker.is_draining ? "warn" : worker.is_healthy ? "good" : "bad"}`}>{health}</span>
          {worker.circuit_breaker && <span class={`pill ${mood}`}>breaker {breaker}</span>}
        </span>
      }
    >
      {worker.job_status && (
        <p class="notice">
          {worker.job_status.job_type ?? "job"}: {worker.job_status.message || worker.job_status.status}
        </p>
      )}
      <Line name="requests" words={`${count(worker.load ?? 0)} sent by this gateway`} part={(worker.load ?? 0) / most} />
      {rows.length > 0 && <Line name="running" words={`${count(add("num_running_reqs"))} of ${count(add("max_running_requests"))}, ${count(add("num_waiting_reqs"))} waiting`} part={add("num_running_reqs") / Math.max(1, add("max_running_requests"))} />}
      {capacity > 0 && <Line name="KV memory" words={`${percent(add("num_used_tokens") / capacity)} in use, ${percent(add("num_cached_tokens") / capacity)} cached`} part={(add("num_used_tokens") + add("num_cached_tokens")) / capacity} />}
      {rows.length > 0 && <Line name="output" words={`${count(add("gen_throughput"))} tokens/s`} />}
      {facts.length > 0 && (
        <dl class="facts narrow">
          {facts.map(([name, value]) => (
            <div>
              <dt>{name}</dt>
              <dd>{value}</dd>
            </div>
          ))}
        </dl>
      )}
      {worker.is_healthy && worker.runtime_type === "sylvan" && /^https?:/.test(worker.url) && (
        <p class="hint">
          <a href={`${worker.url.replace(/\/$/, "")}/ui#/cache`} target="_blank" rel="noopener noreferrer">
            Its own page
          </a>{" "}
          shows its cache and its requests.
        </p>
      )}
    </Card>
  );
}

function Line({ name, words, part }: { name: string; words: string; part?: number }) {
  return (
    <div class="tier">
      <p class="tier-line">
        <span>{name}</span> <span>{words}</span>
      </p>
      {part !== undefined && (
        <div class="meter thin" aria-hidden="true">
          <span class="c1" style={{ width: `${Math.min(100, 100 * part)}%` }} />
        </div>
      )}
    </div>
  );
}
