// The colour theme: light, dark, or the system's.
import { Store } from "./store";

export type Theme = "auto" | "light" | "dark";

const NAME = "sylvan.theme";
const NEXT: Record<Theme, Theme> = { auto: "light", light: "dark", dark: "auto" };

const kept = localStorage.getItem(NAME) as Theme | null;
export const theme = new Store<Theme>(kept && kept in NEXT ? kept : "auto");
show();

export function turnTheme(): void {
  theme.set(NEXT[theme.value]);
  localStorage.setItem(NAME, theme.value);
  show();
}

function show(): void {
  const root = document.documentElement;
  if (theme.value === "auto") delete root.dataset.theme;
  else root.dataset.theme = theme.value;
}
