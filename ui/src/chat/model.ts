// Conversations: trees of turns, of which one path is shown.
export interface Alternative {
  token: string;
  logprob: number;
}

export interface TokenInfo extends Alternative {
  top: Alternative[];
}

export interface ToolCall {
  id: string;
  name: string;
  arguments: string;
}

export interface Stats {
  rid: string;
  promptTokens: number;
  outputTokens: number;
  cachedTokens: number;
  firstTokenS?: number;
  tokensPerS?: number;
  queueS?: number;
  totalS: number;
}

export interface Turn {
  id: string;
  parent: string | null;
  role: "user" | "assistant" | "tool";
  content: string;
  state: "done" | "streaming" | "stopped" | "failed";
  at: number;
  images?: string[];
  reasoning?: string;
  calls?: ToolCall[];
  callId?: string;
  tokens?: TokenInfo[];
  stats?: Stats;
  error?: string;
  finish?: string;
  model?: string;
}

export interface Thread {
  turns: Record<string, Turn>;
  leaf: string | null;
}

export interface Settings {
  model: string;
  system: string;
  temperature: string;
  top_p: string;
  top_k: string;
  min_p: string;
  max_tokens: string;
  repetition_penalty: string;
  presence_penalty: string;
  frequency_penalty: string;
  seed: string;
  stop: string;
  thinking: "" | "on" | "off";
  format: "" | "json_object" | "json_schema" | "regex";
  schema: string;
  regex: string;
  tools: string;
  logprobs: boolean;
}

export interface Pane {
  thread: Thread;
  settings: Settings;
}

export interface Conversation {
  id: string;
  title: string;
  at: number;
  panes: Pane[];
}

export const NO_SETTINGS: Settings = {
  model: "",
  system: "",
  temperature: "",
  top_p: "",
  top_k: "",
  min_p: "",
  max_tokens: "",
  repetition_penalty: "",
  presence_penalty: "",
  frequency_penalty: "",
  seed: "",
  stop: "",
  thinking: "",
  format: "",
  schema: "",
  regex: "",
  tools: "",
  logprobs: false,
};

export function newId(): string {
  const raw = crypto.getRandomValues(new Uint8Array(12));
  return Array.from(raw, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

export function newPane(settings: Settings): Pane {
  return { thread: { turns: {}, leaf: null }, settings: { ...settings } };
}

export function newConversation(settings: Settings = NO_SETTINGS): Conversation {
  return { id: newId(), title: "", at: Date.now(), panes: [newPane(settings)] };
}

/** The turns of the shown path, from the first to the last. */
export function way(thread: Thread): Turn[] {
  const found: Turn[] = [];
  for (let id = thread.leaf; id !== null; ) {
    const turn: Turn | undefined = thread.turns[id];
    if (!turn) break;
    found.push(turn);
    id = turn.parent;
  }
  return found.reverse();
}

/** All versions of a turn, oldest first. */
export function versions(thread: Thread, turn: Turn): Turn[] {
  return Object.values(thread.turns).filter((other) => other.parent === turn.parent);
}

export function withTurn(thread: Thread, turn: Turn): Thread {
  return { turns: { ...thread.turns, [turn.id]: turn }, leaf: turn.id };
}

export function changed(thread: Thread, id: string, change: Partial<Turn>): Thread {
  const turn = thread.turns[id];
  return turn ? { ...thread, turns: { ...thread.turns, [id]: { ...turn, ...change } } } : thread;
}

/** The path that contains a version of a turn, and its newest continuation. */
export function showing(thread: Thread, id: string): Thread {
  let leaf = id;
  const turns = Object.values(thread.turns);
  for (;;) {
    const after = turns.filter((turn) => turn.parent === leaf);
    if (!after.length) return { ...thread, leaf };
    leaf = after[after.length - 1]!.id;
  }
}
