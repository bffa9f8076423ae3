// Calls of the server that sent this page.
import { Store } from "./store";

const BASE = new URL(".", location.href.split("#")[0]);
const KEY = "sylvan.key";

export type Site = "server" | "gateway";
export const site = (document.documentElement.dataset.site ?? "server") as Site;

/** The API key of this tab; it is deleted with the tab. */
export const key = new Store(sessionStorage.getItem(KEY) ?? "");
/** Set when a call was rejected because it had no key. */
export const asksForKey = new Store(false);
/** Set when the stored key was rejected. */
export const refused = new Store(false);
/** Whether the server can be reached; polled until it can. */
export const link = new Store<"up" | "busy" | "lost">("up");

export function setKey(value: string): void {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
  key.set(value);
  refused.set(false);
  asksForKey.set(false);
}

export class ApiError extends Error {
  constructor(
    readonly status: number,
    message: string,
    readonly param?: string,
  ) {
    super(message);
  }
}

/** Return the URL of a path of the server, also behind a proxy with a path prefix. */
export function url(path: string): string {
  return new URL(path.replace(/^\//, ""), BASE).href;
}

export async function send(path: string, init: RequestInit = {}): Promise<Response> {
  const headers = new Headers(init.headers);
  const given = key.value;
  if (given) headers.set("authorization", `Bearer ${given}`);
  let answer: Response;
  try {
    answer = await fetch(url(path), { ...init, headers, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (init.signal?.aborted) throw error;
    link.set("lost");
    throw new ApiError(0, "The server cannot be reached.");
  }
  if (answer.ok) return answer;
  if (answer.status === 401 && given === key.value) {
    refused.set(!!given);
    asksForKey.set(true);
  }
  throw await failure(answer);
}

export async function json<T>(path: string, init: RequestInit = {}): Promise<T> {
  const signal = init.signal ?? AbortSignal.timeout(15_000);
  return (await send(path, { ...init, signal })).json() as Promise<T>;
}

export async function text(path: string): Promise<string> {
  return (await send(path, { signal: AbortSignal.timeout(15_000) })).text();
}

/** Yield the data of server-sent events. */
export async function* events(answer: Response): AsyncGenerator<string> {
  const reader = answer.body!.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      buffer += value;
      const parts = buffer.split(/\r?\n\r?\n/);
      buffer = parts.pop() ?? "";
      for (const part of parts) {
        const lines = part.split(/\r?\n/).filter((line) => line.startsWith("data:"));
        if (lines.length) yield lines.map((line) => line.slice(5).replace(/^ /, "")).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => undefined);
  }
}

async function failure(answer: Response): Promise<ApiError> {
  const raw = await answer.text();
  let message = raw.slice(0, 500) || answer.statusText;
  let param: string | undefined;
  try {
    const said = JSON.parse(raw);
    const error = said.error ?? said;
    message = typeof error === "string" ? error : (error.message ?? said.message ?? message);
    param = error.param ?? undefined;
  } catch {
    // not JSON, for example a text of a proxy
  }
  return new ApiError(answer.status, message, param);
}

/** Poll whether the server can be reached; more often while it cannot. */
export function watchLink(): () => void {
  let timer = 0;
  let over = false;
  const look = async () => {
    try {
      const answer = await fetch(url("/ready"), { cache: "no-store", signal: AbortSignal.timeout(5000) });
      link.set(answer.ok ? "up" : "busy");
    } catch {
      link.set("lost");
    }
    if (!over) timer = window.setTimeout(look, link.value === "up" ? 10_000 : 1500);
  };
  const stop = link.on(() => {
    if (link.value !== "lost") return;
    clearTimeout(timer);
    timer = window.setTimeout(look, 1000);
  });
  void look();
  return () => {
    over = true;
    stop();
    clearTimeout(timer);
  };
}
