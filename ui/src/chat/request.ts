// Builds the body of `/v1/chat/completions` from a conversation and its settings; reads the stream.
import { ApiError, events, link, send } from "../api";
import { record } from "../requests/own";
import type { Settings, Stats, TokenInfo, ToolCall, Turn } from "./model";

export interface SettingsFault {
  field: keyof Settings;
  message: string;
}

const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "max_tokens", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed"] as const;
export const TOP = 5;

/** Validate settings, as far as the page can. */
export function faults(settings: Settings): SettingsFault[] {
  const found: SettingsFault[] = [];
  for (const field of NUMBERS) {
    if (settings[field].trim() && !Number.isFinite(Number(settings[field]))) found.push({ field, message: "Expected a number." });
  }
  if (settings.format === "json_schema") check(found, "schema", settings.schema, (value) => typeof value === "object" && !Array.isArray(value), "a JSON schema: an object");
  if (settings.format === "regex" && !settings.regex) found.push({ field: "regex", message: "Expected a regular expression." });
  if (settings.tools.trim()) check(found, "tools", settings.tools, Array.isArray, "a JSON array of tools");
  return found;
}

function check(found: SettingsFault[], field: keyof Settings, text: string, good: (value: unknown) => boolean, what: string): void {
  try {
    const value: unknown = JSON.parse(text);
    if (value === null || !good(value)) found.push({ field, message: `Expected ${what}.` });
  } catch (error) {
    found.push({ field, message: `Expected ${what}. ${(error as Error).message}` });
  }
}

export function body(turns: Turn[], settings: Settings, rid: string): Record<string, unknown> {
  const asked: Record<string, unknown> = {
    messages: [...(settings.system.trim() ? [{ role: "system", content: settings.system }] : []), ...turns.map(message)],
    stream: true,
    stream_options: { include_usage: true },
    return_meta_info: true,
    rid,
  };
  if (settings.model) asked.model = settings.model;
  for (const field of NUMBERS) if (settings[field].trim()) asked[field] = Number(settings[field]);
  if (settings.stop) asked.stop = settings.stop.split("\n").filter(Boolean);
  if (settings.thinking) asked.chat_template_kwargs = { enable_thinking: settings.thinking === "on" };
  if (settings.format === "json_object") asked.response_format = { type: "json_object" };
  if (settings.format === "json_schema") {
    asked.response_format = { type: "json_schema", json_schema: { name: "answer", schema: JSON.parse(settings.schema) } };
  }
  if (settings.format === "regex") asked.regex = settings.regex;
  if (settings.tools.trim()) asked.tools = JSON.parse(settings.tools);
  if (settings.logprobs) Object.assign(asked, { logprobs: true, top_logprobs: TOP });
  return asked;
}

function message(turn: Turn): Record<string, unknown> {
  if (turn.role === "tool") return { role: "tool", content: turn.content, tool_call_id: turn.callId };
  if (turn.role === "assistant") {
    const calls = turn.calls?.map(({ id, name, arguments: given }) => ({ id, type: "function", function: { name, arguments: given } }));
    return { role: "assistant", content: turn.content, ...(calls?.length ? { tool_calls: calls } : {}) };
  }
  if (!turn.images?.length) return { role: "user", content: turn.content };
  const pictures = turn.images.map((image) => ({ type: "image_url", image_url: { url: image } }));
  return { role: "user", content: [...pictures, { type: "text", text: turn.content }] };
}

/** Send the request, and report each change of the answer; return how it ended. */
export async function ask(asked: Record<string, unknown>, signal: AbortSignal, tell: (change: Partial<Turn>) => void): Promise<void> {
  const rid = asked.rid as string;
  const began = performance.now();
  const read = new Reading(rid, began);
  let frame = 0;
  const show = () => {
    frame = 0;
    tell(read.change());
  };
  try {
    const answer = await send("/v1/chat/completions", {
      method: "POST",
      headers: { "content-type": "application/json", "x-request-id": rid },
      body: JSON.stringify(asked),
      signal,
    });
    for await (const data of events(answer)) {
      if (data === "[DONE]") break;
      read.take(JSON.parse(data));
      frame ||= requestAnimationFrame(show);
    }
    cancelAnimationFrame(frame);
    if (!read.finish) throw new ApiError(0, "The answer was cut off.");
    tell({ ...read.change(), state: "done", stats: read.stats() });
  } catch (error) {
    cancelAnimationFrame(frame);
    if (signal.aborted) {
      tell({ ...read.change(), state: "stopped", stats: read.stats() });
    } else {
      if (!(error instanceof ApiError)) link.set("lost");
      tell({ ...read.change(), state: "failed", error: said(error) });
    }
  }
  record(read.stats(), read.finish ?? (signal.aborted ? "stopped" : "failed"));
}

function said(error: unknown): string {
  if (error instanceof ApiError) return error.param ? `${error.message} (${error.param})` : error.message;
  return "The connection was lost during the answer.";
}

class Reading {
  finish: string | undefined;
  private content = "";
  private reasoning = "";
  private calls: ToolCall[] = [];
  private tokens: TokenInfo[] = [];
  private firstAt: number | undefined;
  private chunks = 0;
  private usage: any;
  private meta: any;
  private model: string | undefined;

  constructor(
    private readonly rid: string,
    private readonly began: number,
  ) {}

  take(chunk: any): void {
    if (chunk.error) throw new ApiError(500, chunk.error.message ?? "The model failed.", chunk.error.param);
    this.model ??= chunk.model;
    this.usage = chunk.usage ?? this.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const { delta } = choice;
    if (delta?.content || delta?.reasoning_content || delta?.tool_calls) {
      this.firstAt ??= performance.now();
      this.chunks += 1;
    }
    this.content += delta?.content ?? "";
    this.reasoning += delta?.reasoning_content ?? "";
    for (const call of delta?.tool_calls ?? []) this.call(call);
    for (const token of choice.logprobs?.content ?? []) {
      const top = (token.top_logprobs ?? []).map(({ token, logprob }: any) => ({ token, logprob }));
      this.tokens.push({ token: token.token, logprob: token.logprob, top });
    }
    this.finish = choice.finish_reason ?? this.finish;
    this.meta = choice.meta_info ?? this.meta;
  }

  private call(part: any): void {
    const known = (this.calls[part.index] ??= { id: "", name: "", arguments: "" });
    known.id ||= part.id ?? "";
    known.name ||= part.function?.name ?? "";
    known.arguments += part.function?.arguments ?? "";
  }

  change(): Partial<Turn> {
    return {
      content: this.content,
      reasoning: this.reasoning || undefined,
      calls: this.calls.length ? this.calls.map((call) => ({ ...call })) : undefined,
      tokens: this.tokens.length ? [...this.tokens] : undefined,
      finish: this.finish,
      model: this.model,
    };
  }

  stats(): Stats {
    const now = performance.now();
    const { meta, usage } = this;
    const outputTokens = usage?.completion_tokens ?? meta?.completion_tokens ?? this.chunks;
    const firstTokenS = this.firstAt === undefined ? undefined : (this.firstAt - this.began) / 1000;
    const decodeS = this.firstAt === undefined ? 0 : (now - this.firstAt) / 1000;
    return {
      rid: this.rid,
      promptTokens: usage?.prompt_tokens ?? meta?.prompt_tokens ?? 0,
      cachedTokens: usage?.prompt_tokens_details?.cached_tokens ?? meta?.cached_tokens ?? 0,
      outputTokens,
      firstTokenS: meta?.first_token_latency ?? firstTokenS,
      tokensPerS: meta?.decode_throughput ?? (outputTokens > 1 && decodeS > 0 ? (outputTokens - 1) / decodeS : undefined),
      queueS: meta?.queue_time,
      totalS: meta?.e2e_latency ?? (now - this.began) / 1000,
    };
  }
}
