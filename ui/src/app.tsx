// The frame around the views: navigation, connection state, and the API key.
import type { JSX } from "preact";
import { useEffect, useState } from "preact/hooks";
import { asksForKey, key, link, refused, setKey, site, watchLink } from "./api";
import { CacheView } from "./cache/cache";
import { Chat } from "./chat/chat";
import { Dashboard } from "./dashboard/dashboard";
import { Gateway } from "./gateway/gateway";
import { Icon, IconButton, Modal } from "./parts/controls";
import { Requests } from "./requests/requests";
import { useStore } from "./store";
import { theme, turnTheme } from "./theme";

const VIEWS = [
  { id: "chat", label: "Chat", view: Chat },
  { id: "dashboard", label: "Dashboard", view: Dashboard },
  { id: "cache", label: "Cache", view: CacheView },
  { id: "requests", label: "Requests", view: Requests },
  { id: "gateway", label: "Gateway", view: Gateway },
].filter(({ id }) => (site === "gateway" ? id !== "cache" : id !== "gateway"));

function where(): { id: string; rest: string } {
  const [id, ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  return { id: VIEWS.some((view) => view.id === id) ? id! : "chat", rest: decodeURIComponent(rest.join("/")) };
}

export function App() {
  const [place, setPlace] = useState(where);
  useEffect(() => {
    const moved = () => setPlace(where());
    addEventListener("hashchange", moved);
    return () => removeEventListener("hashchange", moved);
  }, []);
  useEffect(watchLink, []);
  const found = VIEWS.find((view) => view.id === place.id)!;
  useEffect(() => {
    document.title = `${found.label} · Sylvan`;
  }, [found]);
  const View = found.view as (props: { rest: string }) => JSX.Element;
  return (
    <div class="frame">
      <a class="skip" href="#main" onClick={(event) => (event.preventDefault(), document.getElementById("main")?.focus())}>
        Skip to content
      </a>
      <Navigation here={found.id} />
      <main id="main" tabIndex={-1}>
        <LinkBanner />
        <View rest={place.rest} key={found.id} />
      </main>
      <Login />
    </div>
  );
}

function Navigation({ here }: { here: string }) {
  const state = useStore(link);
  const has = useStore(key);
  const look = useStore(theme);
  const words = { up: "ready", busy: "not ready", lost: "unreachable" }[state];
  return (
    <nav class="rail" aria-label="Views">
      <a class="brand" href="#/chat" aria-label="Sylvan, chat">
        <img src="ui/icon.svg" alt="" width="30" height="30" />
      </a>
      <ul>
        {VIEWS.map(({ id, label }) => (
          <li>
            <a href={`#/${id}`} aria-current={id === here ? "page" : undefined}>
              <Icon name={id} />
              <span>{label}</span>
            </a>
          </li>
        ))}
      </ul>
      <div class="rail-end">
        <span class={`dot ${state}`} role="img" aria-label={`Server: ${words}`} title={`Server: ${words}`} />
        <IconButton icon={{ auto: "auto", light: "sun", dark: "moon" }[look]} label={`Colours: ${look}`} onClick={turnTheme} />
        <IconButton icon="key" label={has ? "Key: given" : "Key: none"} onClick={() => asksForKey.set(true)} pressed={!!has} />
      </div>
    </nav>
  );
}

function LinkBanner() {
  const state = useStore(link);
  return (
    <div role="status" class="link-status">
      {state === "lost" && <p class="banner bad">The server cannot be reached. Trying again…</p>}
      {state === "busy" && <p class="banner">The server is there, but takes no requests now: it is starting, paused or draining.</p>}
    </div>
  );
}

function Login() {
  const open = useStore(asksForKey);
  const has = useStore(key);
  const wrong = useStore(refused);
  const [typed, setTyped] = useState("");
  const enter = (event: Event) => {
    event.preventDefault();
    setKey(typed.trim());
    setTyped("");
  };
  return (
    <Modal title="API key" open={open} onClose={() => asksForKey.set(false)}>
      <form class="login" onSubmit={enter}>
        <label for="api-key">Key of this {site}</label>
        <input
          id="api-key"
          type="password"
          autocomplete="off"
          spellcheck={false}
          aria-invalid={wrong}
          aria-describedby="api-key-note"
          value={typed}
          onInput={(event) => setTyped(event.currentTarget.value)}
          placeholder={has ? "another key" : "sk-…"}
        />
        {wrong && (
          <p class="field-error" role="alert">
            This {site} does not know the key that was given.
          </p>
        )}
        <p class="hint" id="api-key-note">It stays in this tab, and is sent to this server only. An admin key opens all views.</p>
        <div class="buttons">
          {has && (
            <button type="button" class="button" onClick={() => setKey("")}>
              Forget the key
            </button>
          )}
          <button type="submit" class="button main" disabled={!typed.trim()}>
            Log in
          </button>
        </div>
      </form>
    </Modal>
  );
}
