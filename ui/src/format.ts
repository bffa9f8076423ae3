// Formats numbers for people.
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(value: number): string {
  if (value < 1024) return `${Math.round(value)} B`;
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${digits(value)} ${UNITS[unit]}`;
}

export function count(value: number): string {
  if (value >= 1e9) return `${digits(value / 1e9)} G`;
  if (value >= 1e6) return `${digits(value / 1e6)} M`;
  if (value >= 1e4) return `${digits(value / 1e3)} k`;
  return value >= 100 || Number.isInteger(value) ? Math.round(value).toLocaleString("en") : digits(value);
}

/** `1 page`, `2 pages`. */
export function many(value: number, what: string): string {
  return `${count(value)} ${what}${value === 1 ? "" : "s"}`;
}

export function digits(value: number): string {
  return value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2);
}

export function seconds(value: number): string {
  if (value < 1e-3) return `${Math.round(value * 1e6)} µs`;
  if (value < 1) return `${digits(value * 1e3)} ms`;
  if (value < 120) return `${digits(value)} s`;
  return value < 7200 ? `${Math.round(value / 60)} min` : `${digits(value / 3600)} h`;
}

export function percent(value: number): string {
  const scaled = 100 * value;
  if (scaled > 0 && scaled < 0.1) return "< 0.1 %";
  return `${scaled.toFixed(1).replace(".0", "")} %`;
}

export function clock(unix: number): string {
  return new Date(unix * 1000).toLocaleTimeString("en-GB");
}
