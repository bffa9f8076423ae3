// Parses Prometheus text as far as the dashboard needs it: sums over all series of a name.
export interface Sample {
  labels: Record<string, string>;
  value: number;
}
export type Samples = Map<string, Sample[]>;

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)/;
const LABEL = /([a-zA-Z_]\w*)="((?:\\.|[^"\\])*)"/g;

export function parse(text: string): Samples {
  const found: Samples = new Map();
  for (const line of text.split("\n")) {
    if (!line || line.startsWith("#")) continue;
    const match = LINE.exec(line);
    if (!match) continue;
    const labels: Record<string, string> = {};
    for (const [, name, value] of (match[2] ?? "").matchAll(LABEL)) labels[name!] = value!;
    // names start with a configurable prefix
    const name = match[1]!.slice(match[1]!.indexOf(":") + 1);
    const sample = { labels, value: Number(match[3]) };
    const known = found.get(name);
    if (known) known.push(sample);
    else found.set(name, [sample]);
  }
  return found;
}

export function sum(samples: Samples | undefined, name: string, wanted: Record<string, string> = {}): number | undefined {
  const rows = samples?.get(name)?.filter(({ labels }) => Object.entries(wanted).every(([label, value]) => labels[label] === value));
  return rows?.length ? rows.reduce((total, { value }) => total + value, 0) : undefined;
}

/** The increase of a counter; undefined if unknown, or if the server was restarted. */
export function grown(now: Samples | undefined, before: Samples | undefined, name: string, wanted: Record<string, string> = {}): number | undefined {
  const [a, b] = [sum(now, name, wanted), sum(before, name, wanted)];
  return a === undefined || b === undefined || a < b ? undefined : a - b;
}

/** The mean of a histogram between two readings; undefined if it observed nothing. */
export function mean(now: Samples | undefined, before: Samples | undefined, name: string): number | undefined {
  const count = grown(now, before, `${name}_count`);
  const total = grown(now, before, `${name}_sum`);
  return count && total !== undefined ? total / count : undefined;
}

/** The smallest bucket bound with at least this share of the observations below it. */
export function bound(now: Samples | undefined, before: Samples | undefined, name: string, q: number): number | undefined {
  const bounds = new Map<number, number>();
  const add = (samples: Samples | undefined, sign: number) => {
    for (const { labels, value } of samples?.get(`${name}_bucket`) ?? []) {
      const limit = labels.le === "+Inf" ? Infinity : Number(labels.le);
      bounds.set(limit, (bounds.get(limit) ?? 0) + sign * value);
    }
  };
  add(now, 1);
  add(before, -1);
  const rows = [...bounds].sort(([a], [b]) => a - b);
  const total = rows[rows.length - 1]?.[1] ?? 0;
  if (total <= 0) return undefined;
  return rows.find(([, upTo]) => upTo >= q * total)?.[0];
}
