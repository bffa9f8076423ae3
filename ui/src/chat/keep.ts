// Stores conversations in the browser; the server stores none.
import { Store } from "../store";
import { type Conversation, NO_SETTINGS, newConversation } from "./model";

const NAME = "sylvan.chats";
const MOST = 50;
const MOST_CHARS = 4_000_000;

function read(): Conversation[] {
  try {
    const kept = JSON.parse(localStorage.getItem(NAME) ?? "[]") as Conversation[];
    for (const one of kept) {
      for (const pane of one.panes) {
        pane.settings = { ...NO_SETTINGS, ...pane.settings };
        for (const turn of Object.values(pane.thread.turns)) {
          if (turn.state === "streaming") turn.state = "stopped";
        }
      }
    }
    return kept;
  } catch {
    return []; // of another version, or damaged
  }
}

export const conversations = new Store<Conversation[]>(read());
export const current = new Store<Conversation>(conversations.value[0] ?? newConversation());

let timer = 0;

/** Move a conversation to the front if it has messages, and schedule storing all of them. */
export function keep(conversation: Conversation): void {
  current.set(conversation);
  const others = conversations.value.filter((other) => other.id !== conversation.id);
  const said = conversation.panes.some((pane) => pane.thread.leaf !== null);
  conversations.set(said ? [conversation, ...others].slice(0, MOST) : others);
  clearTimeout(timer);
  timer = window.setTimeout(write, 400);
}

export function forget(id: string): void {
  conversations.set(conversations.value.filter((other) => other.id !== id));
  if (current.value.id === id) current.set(newConversation(current.value.panes[0]!.settings));
  write();
}

export function forgetAll(): void {
  conversations.set([]);
  current.set(newConversation(current.value.panes[0]!.settings));
  write();
}

function write(): void {
  let kept = conversations.value;
  let said = JSON.stringify(kept, slim);
  while (said.length > MOST_CHARS && kept.length > 1) {
    kept = kept.slice(0, -1);
    said = JSON.stringify(kept, slim);
  }
  try {
    localStorage.setItem(NAME, said);
  } catch {
    // storage is full or forbidden: the conversations are lost with the page
  }
}

/** Leave out images and probabilities, which are large; they are lost with the page. */
function slim(name: string, value: unknown): unknown {
  return name === "images" || name === "tokens" ? undefined : value;
}

addEventListener("pagehide", write);
