// Small components that all views use.
import type { ComponentChildren } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";
import { ApiError } from "../api";

const PATHS: Record<string, string> = {
  chat: "M4 5h16v11H9l-4 4v-4H4z",
  dashboard: "M4 19V9m5 10V5m5 14v-7m5 7V8",
  cache: "M12 4v5m0 0H6v4m6-4h6v4M6 13v0a2 2 0 1 0 0 4 2 2 0 1 0 0-4m12 0a2 2 0 1 0 0 4 2 2 0 1 0 0-4",
  requests: "M4 6h10M4 12h16M9 18h11",
  gateway: "M4 12h6m0 0 6-6h4m-10 6h10m-10 0 6 6h4",
  send: "M5 12h14m-6-6 6 6-6 6",
  stop: "M7 7h10v10H7z",
  retry: "M19 12a7 7 0 1 1-2-5l2 2m0-5v5h-5",
  edit: "M5 19l1-4L16 5l3 3L9 18z",
  copy: "M9 9h10v10H9zM5 15V5h10",
  check: "M5 12l5 5 9-10",
  close: "M6 6l12 12M18 6 6 18",
  settings: "M4 7h9m4 0h3M4 17h3m4 0h9M15 5v4M9 15v4",
  plus: "M12 5v14M5 12h14",
  trash: "M5 7h14M10 7V4h4v3m-7 0 1 13h8l1-13",
  compare: "M4 5h7v14H4zM13 5h7v14h-7z",
  image: "M4 5h16v14H4zm0 11 5-5 4 4 3-3 4 4",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 1 0 0-8m0-5v2m0 14v2M3 12h2m14 0h2M5.6 5.6 7 7m10 10 1.4 1.4M18.4 5.6 17 7M7 17l-1.4 1.4",
  moon: "M19 14a8 8 0 0 1-9-9 8 8 0 1 0 9 9",
  auto: "M4 5h16v11H4zm5 15h6",
  key: "M8 8a4 4 0 1 0 0 8 4 4 0 1 0 0-8m4 4h9m-3 0v4m-3-4v3",
  menu: "M4 7h16M4 12h16M4 17h16",
  left: "M14 6l-6 6 6 6",
  right: "M10 6l6 6-6 6",
  down: "M6 10l6 6 6-6",
  search: "M11 5a6 6 0 1 0 0 12 6 6 0 1 0 0-12m4.5 10.5L20 20",
};

export function Icon({ name }: { name: string }) {
  return (
    <svg class="icon" viewBox="0 0 24 24" aria-hidden="true" focusable="false">
      <path d={PATHS[name]} />
    </svg>
  );
}

interface ButtonProps {
  icon: string;
  label: string;
  onClick: () => void;
  pressed?: boolean;
  disabled?: boolean;
  class?: string;
  expanded?: boolean;
}

/** An icon button; its name is for screen readers and the tooltip. */
export function IconButton({ icon, label, onClick, pressed, disabled, expanded, class: extra = "" }: ButtonProps) {
  return (
    <button
      type="button"
      class={`icon-button ${extra}`}
      aria-label={label}
      title={label}
      aria-pressed={pressed}
      aria-expanded={expanded}
      disabled={disabled}
      onClick={onClick}
    >
      <Icon name={icon} />
    </button>
  );
}

export function CopyButton({ text, label }: { text: string; label: string }) {
  const [done, setDone] = useState(false);
  const copy = () =>
    void navigator.clipboard?.writeText(text).then(() => {
      setDone(true);
      setTimeout(() => setDone(false), 1500);
    });
  return <IconButton icon={done ? "check" : "copy"} label={done ? "Copied" : label} onClick={copy} />;
}

export function Field({ label, hint, error, children, id }: { label: string; hint?: string; error?: string; children: ComponentChildren; id: string }) {
  return (
    <div class="field">
      <label for={id}>{label}</label>
      {children}
      {error ? (
        <p class="field-error" id={`${id}-note`} role="alert">
          {error}
        </p>
      ) : hint ? (
        <p class="hint" id={`${id}-note`}>
          {hint}
        </p>
      ) : null}
    </div>
  );
}

export function Notice({ error, what }: { error: Error; what: string }) {
  const refused = error instanceof ApiError && error.status === 403;
  const absent = error instanceof ApiError && (error.status === 404 || error.status === 501);
  return (
    <div class={`notice ${refused || absent ? "" : "bad"}`} role="status">
      <strong>{refused ? "Not with this key." : absent ? "Not here." : "That did not work."}</strong>{" "}
      {refused ? `${what} is for the operator; log in with the admin key.` : absent ? `This server has no ${what.toLowerCase()}.` : error.message}
    </div>
  );
}

export function Empty({ title, children }: { title: string; children?: ComponentChildren }) {
  return (
    <div class="empty">
      <h2>{title}</h2>
      {children}
    </div>
  );
}

export function Page({ title, tools, children }: { title: string; tools?: ComponentChildren; children: ComponentChildren }) {
  return (
    <div class="page" tabIndex={0} role="region" aria-label={title}>
      <header class="page-head">
        <h1>{title}</h1>
        <div class="page-tools">{tools}</div>
      </header>
      {children}
    </div>
  );
}

export function Card({ title, aside, children, class: extra = "" }: { title?: string; aside?: ComponentChildren; children: ComponentChildren; class?: string }) {
  return (
    <section class={`card ${extra}`} aria-label={title}>
      {title && (
        <header class="card-head">
          <h2>{title}</h2>
          {aside}
        </header>
      )}
      {children}
    </section>
  );
}

/** A modal dialog. */
export function Modal({ title, open, onClose, children }: { title: string; open: boolean; onClose: () => void; children: ComponentChildren }) {
  const box = useRef<HTMLDialogElement>(null);
  useEffect(() => {
    const dialog = box.current!;
    if (open && !dialog.open) dialog.showModal();
    if (!open && dialog.open) dialog.close();
  }, [open]);
  return (
    <dialog ref={box} class="modal" aria-label={title} onCancel={onClose}>
      <header class="card-head">
        <h2>{title}</h2>
        <IconButton icon="close" label="Close" onClick={onClose} />
      </header>
      {children}
    </dialog>
  );
}
