// The playground: conversations at the left, one or two panes, settings at the right.
import { useEffect, useRef, useState } from "preact/hooks";
import { json, key, site } from "../api";
import { Icon, IconButton, Modal } from "../parts/controls";
import { useStore } from "../store";
import { Composer } from "./composer";
import { conversations, current, forget, forgetAll, keep } from "./keep";
import { type Conversation, NO_SETTINGS, type Pane, newConversation, newId, newPane, type Settings, type Thread, type Turn, changed, way, withTurn } from "./model";
import { Transcript } from "./transcript";
import { ask, body, faults } from "./request";
import { SettingsForm } from "./settings";

export interface Abilities {
  models: string[];
  sees: boolean;
}

const EXAMPLES = ["What is 17 + 25?", "What is the capital of France?", "Who are you?", "Count from 1 to 10."];

export function Chat() {
  const conversation = useStore(current);
  const abilities = useAbilities();
  const [shown, setShown] = useState<"" | "settings" | "history">("");
  const [side, setSide] = useState(0);
  const [spoken, setSpoken] = useState("");
  const running = useRef(new Map<string, AbortController>());
  const [busy, setBusy] = useState(0);
  const two = conversation.panes.length > 1;

  const change = (id: string, index: number, edit: (pane: Pane) => Pane) => {
    const kept = current.value.id === id ? current.value : conversations.value.find((one) => one.id === id);
    if (!kept || !kept.panes[index]) return;
    const panes = kept.panes.map((pane, i) => (i === index ? edit(pane) : pane));
    const next = { ...kept, panes };
    if (current.value.id === id) keep(next);
    else conversations.set(conversations.value.map((one) => (one.id === id ? next : one)));
  };

  const answer = async (index: number, thread: Thread) => {
    const { id } = current.value;
    const { settings } = current.value.panes[index]!;
    const turns = way(thread);
    const rid = `ui-${newId()}`;
    const turn: Turn = { id: rid, parent: thread.leaf, role: "assistant", content: "", state: "streaming", at: Date.now() };
    change(id, index, (pane) => ({ ...pane, thread: withTurn(thread, turn) }));
    const wrong = faults(settings)[0];
    const set = (part: Partial<Turn>) => change(id, index, (pane) => ({ ...pane, thread: changed(pane.thread, rid, part) }));
    if (wrong) {
      set({ state: "failed", error: `Settings, ${wrong.field}: ${wrong.message}` });
      return;
    }
    const stop = new AbortController();
    running.current.set(rid, stop);
    setBusy(running.current.size);
    setSpoken("The model answers.");
    await ask(body(turns, settings, rid), stop.signal, set);
    running.current.delete(rid);
    setBusy(running.current.size);
    const said = current.value.panes[index]?.thread.turns[rid];
    if (said) setSpoken(said.error ? `It failed: ${said.error}` : `Answer: ${said.content.slice(0, 400)}`);
  };

  const say = (content: string, images: string[]) => {
    if (!conversation.title) keep({ ...conversation, title: content.slice(0, 60) || "Picture", at: Date.now() });
    conversation.panes.forEach((pane, index) => {
      const turn: Turn = { id: newId(), parent: pane.thread.leaf, role: "user", content, state: "done", at: Date.now(), images: images.length ? images : undefined };
      void answer(index, withTurn(pane.thread, turn));
    });
  };

  const stopAll = () => running.current.forEach((each) => each.abort());
  useEffect(() => {
    const onKey = (event: KeyboardEvent) => {
      if (event.key === "Escape" && running.current.size) stopAll();
    };
    addEventListener("keydown", onKey);
    return () => removeEventListener("keydown", onKey);
  }, []);

  const compare = () => {
    const [first] = conversation.panes;
    if (two) keep({ ...conversation, panes: [first!] });
    else {
      const second = { ...newPane(first!.settings), thread: structuredClone(first!.thread) };
      keep({ ...conversation, panes: [first!, second] });
    }
    setSide(two ? 0 : 1);
    setShown(two ? "" : "settings");
  };

  const begin = () => {
    current.set(newConversation(conversation.panes[0]!.settings));
    document.getElementById("prompt")?.focus();
  };
  const index = Math.min(side, conversation.panes.length - 1);
  const pane = conversation.panes[index]!;
  const setSettings = (settings: Settings) => change(conversation.id, index, (old) => ({ ...old, settings }));
  const empty = conversation.panes.every((each) => each.thread.leaf === null);

  return (
    <div class={`chat ${shown === "settings" ? "with-settings" : ""}`}>
      <History conversation={conversation} onNew={begin} />
      <section class="talk" aria-label="Conversation">
        <header class="talk-head">
          <IconButton icon="menu" label="Conversations" class="narrow-only" onClick={() => setShown("history")} />
          <h1 class="talk-title">{conversation.title || "New conversation"}</h1>
          <ModelChoice panes={conversation.panes} models={abilities.models} onChoose={(i, model) => change(conversation.id, i, (old) => ({ ...old, settings: { ...old.settings, model } }))} />
          <IconButton icon="compare" label="Compare side by side" pressed={two} onClick={compare} />
          <IconButton icon="settings" label="Settings" pressed={shown === "settings"} expanded={shown === "settings"} onClick={() => setShown(shown === "settings" ? "" : "settings")} />
        </header>
        {empty ? (
          <div class="greeting">
            <img src="ui/icon.svg" alt="" width="56" height="56" />
            <h2>What shall we talk about?</h2>
            <p>Answers come from {abilities.models[0] ? <strong>{abilities.models[0]}</strong> : "the model"} on this {site}.</p>
            <ul class="examples">
              {EXAMPLES.map((example) => (
                <li>
                  <button type="button" class="chip" onClick={() => say(example, [])}>
                    {example}
                  </button>
                </li>
              ))}
            </ul>
          </div>
        ) : (
          <div class={`panes ${two ? "two" : ""}`}>
            {conversation.panes.map((each, i) => (
              <Transcript
                key={`${conversation.id}-${i}`}
                name={two ? `${"AB"[i]}: ${each.settings.model || abilities.models[0] || "model"}${difference(conversation.panes, i)}` : ""}
                thread={each.thread}
                busy={busy > 0}
                onThread={(thread) => change(conversation.id, i, (old) => ({ ...old, thread }))}
                onAnswer={(thread) => void answer(i, thread)}
              />
            ))}
          </div>
        )}
        <Composer busy={busy > 0} sees={abilities.sees} onSend={say} onStop={stopAll} />
        <p class="hidden" role="status" aria-live="polite">
          {spoken}
        </p>
      </section>
      {shown === "settings" && (
        <aside class="drawer" aria-label="Settings">
          <header class="card-head">
            <h2>Settings</h2>
            <IconButton icon="close" label="Close settings" onClick={() => setShown("")} />
          </header>
          {two && (
            <div class="segments" role="group" aria-label="Side">
              {conversation.panes.map((_, i) => (
                <button type="button" aria-pressed={i === index} onClick={() => setSide(i)}>
                  Side {"AB"[i]}
                </button>
              ))}
            </div>
          )}
          <SettingsForm key={`${conversation.id}-${index}`} settings={pane.settings} models={abilities.models} onChange={setSettings} onReset={() => setSettings({ ...NO_SETTINGS, model: pane.settings.model })} />
        </aside>
      )}
      <Modal title="Conversations" open={shown === "history"} onClose={() => setShown("")}>
        <HistoryList conversation={conversation} onNew={() => (begin(), setShown(""))} onChosen={() => setShown("")} />
      </Modal>
    </div>
  );
}

function difference(panes: Pane[], index: number): string {
  const [a, b] = panes;
  if (!a || !b) return "";
  const names = (Object.keys(NO_SETTINGS) as (keyof Settings)[]).filter((name) => name !== "model" && a.settings[name] !== b.settings[name]);
  const short = (name: keyof Settings) => {
    const value = panes[index]!.settings[name];
    const text = typeof value === "boolean" ? (value ? "on" : "off") : value || "default";
    return text.length > 12 || text.includes("\n") ? "…" : text;
  };
  return names.length ? ` · ${names.slice(0, 3).map((name) => `${name.replace(/_/g, " ")} ${short(name)}`).join(", ")}` : "";
}

function useAbilities(): Abilities {
  const [found, setFound] = useState<Abilities>({ models: [], sees: false });
  const has = useStore(key);
  useEffect(() => {
    let over = false;
    void (async () => {
      try {
        const cards = await json<{ data: { id: string }[] }>("/v1/models");
        const models = cards.data.map((card) => card.id);
        if (!over) setFound((old) => ({ ...old, models }));
        const facts = await json<{ has_image_understanding?: boolean }>("/model_info");
        if (!over) setFound((old) => ({ ...old, sees: facts.has_image_understanding === true }));
      } catch {
        // the banner and the key dialog show the error; a message can still be sent
      }
    })();
    return () => {
      over = true;
    };
  }, [has]);
  return found;
}

function ModelChoice({ panes, models, onChoose }: { panes: Pane[]; models: string[]; onChoose: (index: number, model: string) => void }) {
  if (panes.length > 1) return null;
  const chosen = panes[0]!.settings.model || models[0];
  if (models.length < 2) return <span class="talk-model">{chosen}</span>;
  return (
    <select class="model-choice" aria-label="Model" value={chosen} onChange={(event) => onChoose(0, event.currentTarget.value)}>
      {models.map((name) => (
        <option value={name}>{name}</option>
      ))}
    </select>
  );
}

function History(props: { conversation: Conversation; onNew: () => void }) {
  return (
    <aside class="history" aria-label="Conversations">
      <HistoryList {...props} onChosen={() => {}} />
    </aside>
  );
}

function HistoryList({ conversation, onNew, onChosen }: { conversation: Conversation; onNew: () => void; onChosen: () => void }) {
  const all = useStore(conversations);
  const [sure, setSure] = useState(false);
  return (
    <>
      <button type="button" class="button wide" onClick={onNew}>
        <Icon name="plus" /> New conversation
      </button>
      <ul class="history-list">
        {all.map((one) => (
          <li class={one.id === conversation.id ? "current" : ""}>
            <button
              type="button"
              class="history-open"
              aria-current={one.id === conversation.id ? "true" : undefined}
              onClick={() => {
                current.set(one);
                onChosen();
              }}
            >
              {one.title || "Conversation"}
            </button>
            <IconButton icon="trash" label={`Delete ${one.title || "conversation"}`} onClick={() => forget(one.id)} />
          </li>
        ))}
      </ul>
      {all.length > 0 && (
        <div class="history-end">
          <p class="hint">Kept in this browser only.</p>
          <button type="button" class="button small" onClick={() => (sure ? (forgetAll(), setSure(false)) : setSure(true))} onBlur={() => setSure(false)}>
            {sure ? "Really delete all?" : "Delete all"}
          </button>
        </div>
      )}
    </>
  );
}
