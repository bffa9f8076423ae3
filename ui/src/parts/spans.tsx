// Parses the spans of a trace in any format, and draws them.
import { seconds } from "../format";
import { STAGES } from "./stages";

export interface Span {
  name: string;
  startS: number;
  endS: number;
  depth: number;
  track?: string;
  detail?: string;
}

const MOST = 400;
const STARTS = ["start_ms", "start_s", "start", "start_time", "startTimeUnixNano", "start_time_unix_nano", "start_ns", "begin", "ts"];
const ENDS = ["end_ms", "end_s", "end", "end_time", "endTimeUnixNano", "end_time_unix_nano", "end_ns", "stop"];
const LENGTHS = ["duration_ms", "duration_s", "duration", "seconds", "dur"];

/** The spans in an answer of `/trace/…`: a tree, a list, OTLP's JSON or Chrome's trace events. */
export function spansIn(document: unknown): Span[] {
  const found: Span[] = [];
  const depths = new Map<string, number>();
  const tracks = new Map<string, string>();
  const walk = (value: unknown, depth: number) => {
    if (found.length >= MOST || value === null || typeof value !== "object") return;
    if (Array.isArray(value)) {
      value.forEach((each) => walk(each, depth));
      return;
    }
    const object = value as Record<string, any>;
    if (object.ph === "M" && object.name === "thread_name") tracks.set(`${object.pid}/${object.tid}`, String(object.args?.name ?? ""));
    const parent = object.parent_id ?? object.parentSpanId ?? object.parent_span_id;
    const span = asSpan(object, parent === undefined ? depth : (depths.get(parent) ?? -1) + 1);
    if (span) {
      found.push(span);
      depths.set(object.span_id ?? object.spanId, span.depth);
    }
    for (const child of Object.values(object)) if (child && typeof child === "object") walk(child, span ? depth + 1 : depth);
  };
  walk(document, 0);
  for (const span of found) span.track = span.track && (tracks.get(span.track) ?? span.track);
  return found.sort((a, b) => a.startS - b.startS || b.endS - a.endS);
}

function asSpan(object: Record<string, any>, depth: number): Span | undefined {
  if (typeof object.name !== "string" || (object.ph !== undefined && object.ph !== "X")) return undefined;
  const toS = object.ph === "X" ? (value: number) => value / 1e6 : scaled; // Chrome's are in microseconds
  const start = first(object, STARTS);
  const end = first(object, ENDS);
  const length = first(object, LENGTHS);
  if (start === undefined || (end === undefined && length === undefined)) return undefined;
  const startS = toS(start);
  const endS = end === undefined ? startS + toS(length!) : toS(end);
  const detail = object.args ?? object.attributes;
  const track = object.ph === "X" ? `${object.pid}/${object.tid}` : object.process;
  return { name: object.name, startS, endS: Math.max(startS, endS), depth, track, detail: detail && JSON.stringify(detail).slice(0, 300) };
}

function first(object: Record<string, any>, names: string[]): number | undefined {
  for (const name of names) {
    const value = typeof object[name] === "string" && object[name] ? Number(object[name]) : object[name];
    if (typeof value === "number" && Number.isFinite(value)) return name.endsWith("_ms") ? value / 1000 : value;
  }
  return undefined;
}

/** Recognise Unix times in nanoseconds by their size. */
function scaled(value: number): number {
  return value > 1e15 ? value / 1e9 : value;
}

export function Waterfall({ spans, label }: { spans: Span[]; label: string }) {
  const from = Math.min(...spans.map(({ startS }) => startS));
  const to = Math.max(...spans.map(({ endS }) => endS), from + 1e-9);
  const share = (value: number) => (100 * value) / (to - from);
  return (
    <ol class="waterfall" aria-label={label}>
      {spans.map(({ name, startS, endS, depth, detail, track }) => (
        <li title={detail}>
          <span class="span-name" style={{ paddingLeft: `${Math.min(depth, 8) * 12}px` }} title={name}>
            {STAGES[name]?.[0] ?? name} {track && <small>{track}</small>}
          </span>
          <span class="span-lane">
            <span class={`span-bar ${STAGES[name] ? `c${STAGES[name][2]}` : "whole"}`} style={{ left: `${share(startS - from)}%`, width: `max(2px, ${share(endS - startS)}%)` }} />
          </span>
          <span class="span-time">{seconds(endS - startS)}</span>
        </li>
      ))}
    </ol>
  );
}
