// Values that components subscribe to.
import { useEffect, useRef, useState } from "preact/hooks";
import { link } from "./api";

export class Store<T> {
  private readonly listeners = new Set<() => void>();

  constructor(public value: T) {}

  set(value: T): void {
    if (Object.is(value, this.value)) return;
    this.value = value;
    for (const listener of [...this.listeners]) listener();
  }

  on(listener: () => void): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }
}

export function useStore<T>(store: Store<T>): T {
  const [, redraw] = useState(0);
  useEffect(() => store.on(() => redraw((n) => n + 1)), [store]);
  return store.value;
}

export interface Polled<T> {
  data: T | undefined;
  error: Error | undefined;
  again: () => void;
}

/** Poll while the page is visible; keep the last value while calls fail. */
export function usePoll<T>(ask: () => Promise<T>, everyMs: number, deps: unknown[] = []): Polled<T> {
  const [state, setState] = useState<{ data?: T; error?: Error }>({});
  const kick = useRef(() => {});
  useEffect(() => {
    let timer = 0;
    let over = false;
    let busy = false;
    const run = async () => {
      clearTimeout(timer);
      if (over || busy || document.hidden) return;
      busy = true;
      try {
        const data = await ask();
        if (!over) setState({ data });
      } catch (error) {
        if (!over) setState((old) => ({ data: old.data, error: error as Error }));
      }
      busy = false;
      if (!over && everyMs) timer = window.setTimeout(run, everyMs);
    };
    kick.current = () => void run();
    void run();
    document.addEventListener("visibilitychange", kick.current);
    const stop = link.on(() => link.value === "up" && kick.current());
    return () => {
      over = true;
      clearTimeout(timer);
      stop();
      document.removeEventListener("visibilitychange", kick.current);
    };
  }, [everyMs, ...deps]);
  return { data: state.data, error: state.error, again: () => kick.current() };
}
