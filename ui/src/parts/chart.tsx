// Line charts over time, as one SVG without a library. Screen readers and the pointer get values.
import { useId, useLayoutEffect, useRef, useState } from "preact/hooks";
import { useEffect } from "preact/hooks";

export interface Series {
  name: string;
  values: (number | null)[];
  color: number; // of the palette, from 1
}

interface Props {
  label: string;
  times: number[]; // seconds, ascending
  series: Series[];
  show: (value: number) => string;
  max?: number;
  least?: number; // of the upper end of the axis
  stacked?: boolean;
  height?: number;
  axis?: (time: number, last: number) => string;
}

const PAD = { left: 46, right: 8, top: 10, bottom: 20 };

export function Chart({ label, times, series, show, max, least = 1, stacked = false, height = 170, axis = ago }: Props) {
  const [width, box] = useWidth();
  const [at, setAt] = useState<number>();
  const id = useId();
  const stacks = stacked ? stack(series) : series.map(({ values }) => values);
  const top = max ?? nice(Math.max(least, ...stacks.flat().map((value) => value ?? 0)));
  const [first, last] = [times[0] ?? 0, times[times.length - 1] ?? 1];
  const x = (time: number) => PAD.left + ((time - first) / Math.max(1e-9, last - first)) * (width - PAD.left - PAD.right);
  const y = (value: number) => PAD.top + (1 - Math.min(1, value / top)) * (height - PAD.top - PAD.bottom);
  const shown = at === undefined ? undefined : Math.min(at, times.length - 1);
  const newest = series.map(({ name, values }) => `${name} ${reads(values[values.length - 1], show)}`).join(", ");

  const find = (clientX: number) => {
    const frame = box.current!.getBoundingClientRect();
    const time = first + ((clientX - frame.left - PAD.left) / (width - PAD.left - PAD.right)) * (last - first);
    let best = 0;
    times.forEach((each, i) => Math.abs(each - time) < Math.abs(times[best]! - time) && (best = i));
    setAt(best);
  };
  const keyed = (event: KeyboardEvent) => {
    const step = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (event.key === "Escape") setAt(undefined);
    if (!step || !times.length) return;
    event.preventDefault();
    setAt(Math.max(0, Math.min(times.length - 1, (shown ?? times.length) + step)));
  };

  return (
    <figure class="chart" ref={box}>
      <svg
        width={width}
        height={height}
        role="img"
        aria-labelledby={`${id}-label`}
        tabIndex={0}
        onPointerMove={(event) => find(event.clientX)}
        onPointerLeave={() => setAt(undefined)}
        onBlur={() => setAt(undefined)}
        onKeyDown={keyed}
      >
        <title id={`${id}-label`}>{`${label}: now ${newest}. Arrow keys go through time.`}</title>
        {[0, 0.5, 1].map((part) => (
          <g class="grid">
            <line x1={PAD.left} x2={width - PAD.right} y1={y(top * part)} y2={y(top * part)} />
            <text x={PAD.left - 6} y={y(top * part) + 3.5} text-anchor="end">
              {show(top * part)}
            </text>
          </g>
        ))}
        <text class="axis" x={PAD.left} y={height - 4}>
          {axis(first, last)}
        </text>
        <text class="axis" x={width - PAD.right} y={height - 4} text-anchor="end">
          {axis(last, last)}
        </text>
        {series.map(({ color }, i) => {
          const line = path(times, stacks[i]!, x, y);
          const below = stacked && i > 0 ? stacks[i - 1]! : times.map(() => 0);
          return (
            <g class={`series c${color}`}>
              {times.length > 1 && (stacked || series.length === 1) && <path class="area" d={area(times, stacks[i]!, below, x, y)} />}
              <path class="line" d={line} />
            </g>
          );
        })}
        {shown !== undefined && times.length > 0 && (
          <g class="cross">
            <line x1={x(times[shown]!)} x2={x(times[shown]!)} y1={PAD.top} y2={height - PAD.bottom} />
            {series.map(({ color }, i) => {
              const value = stacks[i]![shown];
              return value == null ? null : <circle class={`c${color}`} cx={x(times[shown]!)} cy={y(value)} r="3.5" />;
            })}
          </g>
        )}
      </svg>
      <figcaption class="legend" aria-hidden={shown === undefined} aria-live="polite">
        {series.map(({ name, values, color }) => (
          <span class={`c${color}`}>
            <i /> {name} <b>{reads(values[shown ?? values.length - 1], show)}</b>
          </span>
        ))}
        {shown !== undefined && <span class="when">{axis(times[shown]!, last)}</span>}
      </figcaption>
    </figure>
  );
}

function useWidth() {
  const box = useRef<HTMLElement>(null);
  const [width, setWidth] = useState(400);
  useLayoutEffect(() => setWidth(box.current?.clientWidth || 400), []);
  useEffect(() => {
    const watch = new ResizeObserver(() => box.current && setWidth(box.current.clientWidth || 400));
    watch.observe(box.current!);
    return () => watch.disconnect();
  }, []);
  return [width, box] as const;
}

function stack(series: Series[]): (number | null)[][] {
  const sums: (number | null)[][] = [];
  series.forEach(({ values }, i) => sums.push(values.map((value, t) => (value ?? 0) + (i ? (sums[i - 1]![t] ?? 0) : 0))));
  return sums;
}

function path(times: number[], values: (number | null)[], x: (t: number) => number, y: (v: number) => number): string {
  let pen = "M";
  let found = "";
  values.forEach((value, i) => {
    if (value == null) {
      pen = "M";
      return;
    }
    found += `${pen}${x(times[i]!).toFixed(1)} ${y(value).toFixed(1)}`;
    pen = "L";
  });
  return found;
}

function area(times: number[], values: (number | null)[], below: (number | null)[], x: (t: number) => number, y: (v: number) => number): string {
  const there = values.map((value, i) => ({ value, i })).filter(({ value }) => value != null);
  if (!there.length) return "";
  const over = there.map(({ value, i }) => `${x(times[i]!).toFixed(1)} ${y(value!).toFixed(1)}`);
  const under = [...there].reverse().map(({ i }) => `${x(times[i]!).toFixed(1)} ${y(below[i] ?? 0).toFixed(1)}`);
  return `M${over.join("L")}L${under.join("L")}Z`;
}

function nice(value: number): number {
  const size = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 4, 5, 10].map((step) => step * size).find((step) => step >= value) ?? value;
}

function ago(time: number, last: number): string {
  const passed = Math.round(last - time);
  return passed <= 0 ? "now" : passed < 60 ? `${passed} s ago` : `${Math.floor(passed / 60)} min ${passed % 60 ? `${passed % 60} s ` : ""}ago`;
}

function reads(value: number | null | undefined, show: (value: number) => string): string {
  return value == null ? "–" : show(value);
}
