// The state of the server, now and in the last minutes.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { ApiError, json, key, site, text } from "../api";
import { bytes, count, digits, percent, seconds } from "../format";
import { Chart } from "../parts/chart";
import { Card, Notice, Page } from "../parts/controls";
import { usePoll, useStore } from "../store";
import { bound, grown, mean, parse, type Samples, sum } from "./metrics";
import { Steps } from "./steps";

export interface LoadRow {
  dp_rank: number;
  worker?: string;
  num_running_reqs: number;
  num_waiting_reqs: number;
  num_used_tokens: number;
  num_cached_tokens: number;
  max_total_num_tokens: number;
  max_running_requests: number;
  gen_throughput: number;
  steps: number;
  computed_tokens: number;
  generated_tokens: number;
  num_retractions: number;
}

interface Reading {
  at: number;
  rows: LoadRow[];
  samples?: Samples;
}

const EVERY_MS = 2000;
const KEPT = 150; // five minutes
const WINDOW = 30; // readings that latencies and the hit rate are of: a minute
const METRICS = site === "gateway" ? "/engine_metrics" : "/metrics";

let history: Reading[] = []; // goes on while another view is shown

export function Dashboard() {
  const has = useStore(key);
  const [readings, setReadings] = useState(history);
  const polled = usePoll(read, EVERY_MS, [has]);
  useEffect(() => {
    if (!polled.data) return;
    history = [...history, polled.data].slice(-KEPT);
    setReadings(history);
  }, [polled.data]);
  const facts = usePoll(serverFacts, 30_000, [has]);
  const series = useMemo(() => measured(readings), [readings]);
  const now = readings[readings.length - 1];
  if (!now) {
    return <Page title="Dashboard">{polled.error ? <Notice error={polled.error} what="Loads" /> : <p class="loading">Asking the server…</p>}</Page>;
  }
  const total = totals(now.rows);
  const before = readings[Math.max(0, readings.length - 1 - WINDOW)];
  const last = <T,>(values: T[]) => values[values.length - 1];
  const latency = (name: string) => ({
    value: shown(mean(now.samples, before?.samples, name), seconds),
    unit: shown(bound(now.samples, before?.samples, name, 0.95), (value) => (Number.isFinite(value) ? `p95 < ${seconds(value)}` : "p95 off the scale")).replace("–", "last minute"),
  });
  return (
    <Page title="Dashboard" tools={<span class="hint">{facts.data?.title ?? ""}</span>}>
      {polled.error && !(polled.error instanceof ApiError && polled.error.status === 0) && <Notice error={polled.error} what="Loads" />}
      <div class="tiles">
        <Tile name="Output" value={count(last(series.output) ?? 0)} unit="tokens/s" />
        <Tile name="Prompts" value={count(last(series.prompt) ?? 0)} unit="tokens/s" />
        <Tile name="Running" value={count(total.running)} unit={`of ${count(total.mostRunning)}`} />
        <Tile name="Waiting" value={count(total.waiting)} unit="requests" alarm={total.waiting > total.mostRunning} />
        <Tile name="KV memory" value={percent(total.used / Math.max(1, total.capacity))} unit="in use" alarm={total.used / total.capacity > 0.95} />
        <Tile name="Hit rate" value={shown(last(series.hits), percent)} unit="last minute" />
        <Tile name="First token" {...latency("time_to_first_token_seconds")} />
        <Tile name="Each token" {...latency("inter_token_latency_seconds")} />
      </div>
      <div class="cards">
        <Card title="Throughput">
          <Chart label="Throughput in tokens per second" times={series.times} show={count} series={[{ name: "output tokens/s", values: series.output, color: 1 }, { name: "prompt tokens/s", values: series.prompt, color: 2 }]} />
        </Card>
        <Card title="Requests">
          <Chart label="Requests" times={series.times} show={count} series={[{ name: "running", values: series.running, color: 1 }, { name: "waiting", values: series.waiting, color: 3 }]} />
        </Card>
        <Card title="KV memory">
          <Chart label="KV memory of the device in tokens" stacked times={series.times} show={count} series={[{ name: "in use", values: series.used, color: 1 }, { name: "cached", values: series.cached, color: 4 }]} />
          <Tiers rows={now.rows} samples={now.samples} bytesPerToken={facts.data?.bytesPerToken} />
        </Card>
        <Card title="Prefix cache">
          <Chart label="Hit rate of prompts" times={series.times} show={percent} max={1} series={[{ name: "hit rate, of a minute", values: series.hits, color: 2 }]} />
        </Card>
        <Steps times={series.times} stepMs={series.stepMs} perStep={series.perStep} />
        <Card title="Ended" class="ended">
          <Ended samples={now.samples} before={before?.samples} />
        </Card>
      </div>
      {now.rows.length > 1 && <Replicas rows={now.rows} />}
      {facts.data && (
        <Card title="Server">
          <dl class="facts">
            {facts.data.facts.map(([name, value]) => (
              <div>
                <dt>{name}</dt>
                <dd>{value}</dd>
              </div>
            ))}
          </dl>
        </Card>
      )}
    </Page>
  );
}

async function read(): Promise<Reading> {
  const [loads, metrics] = await Promise.all([
    json<{ loads: LoadRow[] }>("/v1/loads"),
    text(METRICS).catch(() => undefined), // turned off, or behind a proxy that keeps it inside
  ]);
  return { at: Date.now() / 1000, rows: loads.loads, samples: metrics === undefined ? undefined : parse(metrics) };
}

interface Facts {
  title: string;
  bytesPerToken?: number;
  facts: [string, string][];
}

async function serverFacts(): Promise<Facts> {
  const info = await json<any>("/server_info");
  const memory = (info.internal_states ?? []).map((state: any) => state.memory_usage).find(Boolean);
  const capacity = memory?.token_capacity;
  const facts: [string, unknown][] = [
    ["model", info.served_model_name],
    ["version", info.version],
    ["device", info.device],
    ["runner", info.effective_runner ?? info.runner],
    ["context", info.context_length && `${count(info.context_length)} tokens`],
    ["weights", memory?.weight && bytes(memory.weight * 1e9)],
    ["KV memory", memory?.kvcache && `${bytes(memory.kvcache * 1e9)}, ${count(capacity)} tokens`],
    ["page", info.page_size && `${info.page_size} tokens`],
    ["policy", info.scheduler?.policy],
    ["replicas", info.dp_size],
    ["weight label", info.weight_version],
    ["since", info.startup_time && new Date(info.startup_time * 1000).toLocaleString("en-GB")],
  ];
  return {
    title: `${info.served_model_name ?? ""} · ${info.state ?? ""}`.replace(/^ · | · $/g, ""),
    bytesPerToken: memory?.kvcache && capacity ? (memory.kvcache * 1e9) / capacity : undefined,
    facts: facts.filter(([, value]) => value !== undefined && value !== null && value !== "").map(([name, value]) => [name, String(value)]),
  };
}

function totals(rows: LoadRow[]) {
  const add = (name: keyof LoadRow) => rows.reduce((total, row) => total + (Number(row[name]) || 0), 0);
  return {
    running: add("num_running_reqs"),
    waiting: add("num_waiting_reqs"),
    mostRunning: add("max_running_requests"),
    used: add("num_used_tokens"),
    cached: add("num_cached_tokens"),
    capacity: add("max_total_num_tokens"),
    steps: add("steps"),
    computed: add("computed_tokens"),
    generated: add("generated_tokens"),
  };
}

/** Numbers over time; null if a reading is missing, for example during a restart. */
function measured(readings: Reading[]) {
  const found = {
    times: [] as number[],
    output: [] as (number | null)[],
    prompt: [] as (number | null)[],
    running: [] as (number | null)[],
    waiting: [] as (number | null)[],
    used: [] as (number | null)[],
    cached: [] as (number | null)[],
    hits: [] as (number | null)[],
    stepMs: [] as (number | null)[],
    perStep: [] as (number | null)[],
  };
  readings.forEach((reading, i) => {
    const total = totals(reading.rows);
    const old = i ? readings[i - 1]! : undefined;
    const was = old && totals(old.rows);
    const passed = old ? reading.at - old.at : 0;
    const fresh = !was || passed > 15 || total.steps < was.steps; // a gap, or another life
    const rate = (name: "generated" | "computed" | "steps") => (fresh ? null : (total[name] - was[name]) / passed);
    const [output, computed, steps] = [rate("generated"), rate("computed"), rate("steps")];
    found.times.push(reading.at);
    found.output.push(output);
    found.prompt.push(output === null || computed === null ? null : Math.max(0, computed - output));
    found.running.push(total.running);
    found.waiting.push(total.waiting);
    found.used.push(total.used);
    found.cached.push(total.cached);
    const before = readings[Math.max(0, i - WINDOW)];
    const prompts = grown(reading.samples, before?.samples, "prompt_tokens_total");
    const cached = grown(reading.samples, before?.samples, "cached_tokens_total");
    found.hits.push(prompts ? Math.min(1, (cached ?? 0) / prompts) : null);
    found.stepMs.push(steps && total.running ? 1000 / steps : null);
    found.perStep.push(steps && computed ? computed / steps : null);
  });
  return found;
}

function shown(value: number | null | undefined, show: (value: number) => string): string {
  return value == null ? "–" : show(value);
}

function Tile({ name, value, unit, alarm = false }: { name: string; value: string; unit: string; alarm?: boolean }) {
  return (
    <div class={`tile ${alarm ? "alarm" : ""}`}>
      <p class="tile-name">{name}</p>
      <p class="tile-value">{value}</p>
      <p class="tile-unit">{unit}</p>
    </div>
  );
}

/** Usage of each KV memory. */
function Tiers({ rows, samples, bytesPerToken }: { rows: LoadRow[]; samples?: Samples; bytesPerToken?: number }) {
  const total = totals(rows);
  const host = sum(samples, "hicache_host_total_tokens");
  const pages = sum(samples, "hicache_known_pages");
  const size = (tokens: number) => (bytesPerToken ? `${bytes(tokens * bytesPerToken)}, ${count(tokens)} tokens` : `${count(tokens)} tokens`);
  return (
    <div class="tiers">
      <Meter name="device" parts={[total.used, total.cached]} of={total.capacity} words={`${size(total.used + total.cached)} of ${size(total.capacity)}`} />
      {host !== undefined && host > 0 && <Meter name="host" parts={[sum(samples, "hicache_host_used_tokens") ?? 0]} of={host} words={`${size(sum(samples, "hicache_host_used_tokens") ?? 0)} of ${size(host)}`} />}
      {pages !== undefined && pages > 0 && <p class="tier-line"><span>storage</span> <span>{count(pages)} pages that the prefix tree knows</span></p>}
    </div>
  );
}

function Meter({ name, parts, of, words }: { name: string; parts: number[]; of: number; words: string }) {
  return (
    <div class="tier">
      <p class="tier-line">
        <span>{name}</span> <span>{words}</span>
      </p>
      <div class="meter" role="img" aria-label={`${name}: ${words}`}>
        {parts.map((part, i) => (
          <span class={i ? "c4" : "c1"} style={{ width: `${Math.min(100, (100 * part) / Math.max(1, of))}%` }} />
        ))}
      </div>
    </div>
  );
}

const ENDS: Record<string, string> = { stop: "stopped by themselves", length: "reached their length", abort_client: "left by clients", abort_server: "ended by the server" };

function Ended({ samples, before }: { samples?: Samples; before?: Samples }) {
  const rows = samples?.get("num_requests_total");
  if (!rows?.length) return <p class="hint">{samples ? "No request has ended yet." : "The metrics of this server are turned off."}</p>;
  const kinds = [...new Set(rows.map(({ labels }) => labels.finish ?? labels.finish_reason ?? "all"))];
  const known = (kind: string): Record<string, string> => (rows[0]!.labels.finish === undefined ? {} : { finish: kind });
  return (
    <table class="plain-table">
      <thead>
        <tr>
          <th scope="col">Requests</th>
          <th scope="col" class="number">last minute</th>
          <th scope="col" class="number">in all</th>
        </tr>
      </thead>
      <tbody>
        {kinds.map((kind) => (
          <tr>
            <th scope="row">{ENDS[kind] ?? kind}</th>
            <td class="number">{count(grown(samples, before, "num_requests_total", known(kind)) ?? 0)}</td>
            <td class="number">{count(sum(samples, "num_requests_total", known(kind)) ?? 0)}</td>
          </tr>
        ))}
      </tbody>
    </table>
  );
}

function Replicas({ rows }: { rows: LoadRow[] }) {
  const ref = useRef<HTMLDivElement>(null);
  return (
    <Card title={rows[0]!.worker ? "Workers" : "Replicas"}>
      <div class="table-scroll" ref={ref} tabIndex={0} role="region" aria-label="Replicas">
        <table class="plain-table">
          <thead>
            <tr>
              <th scope="col">{rows[0]!.worker ? "Worker" : "Replica"}</th>
              <th scope="col" class="number">running</th>
              <th scope="col" class="number">waiting</th>
              <th scope="col" class="number">KV in use</th>
              <th scope="col" class="number">tokens/s</th>
              <th scope="col" class="number">retracted</th>
            </tr>
          </thead>
          <tbody>
            {rows.map((row) => (
              <tr>
                <th scope="row">{row.worker ?? row.dp_rank}</th>
                <td class="number">{row.num_running_reqs}</td>
                <td class="number">{row.num_waiting_reqs}</td>
                <td class="number">{percent(row.num_used_tokens / Math.max(1, row.max_total_num_tokens))}</td>
                <td class="number">{digits(row.gen_throughput)}</td>
                <td class="number">{row.num_retractions}</td>
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </Card>
  );
}
