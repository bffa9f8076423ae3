// The scheduler's steps: each of the newest if the server lists them, else their means.
import { useMemo, useState } from "preact/hooks";
import { ApiError, json } from "../api";
import { count, digits, seconds } from "../format";
import { Chart } from "../parts/chart";
import { Card } from "../parts/controls";
import { type Span, spansIn } from "../parts/spans";
import { usePoll } from "../store";

interface Props {
  times: number[];
  stepMs: (number | null)[];
  perStep: (number | null)[];
}

interface Step {
  kind: string;
  planS: number;
  runS: number;
  at: number;
  detail?: string;
}

const EVERY_MS = 4000;
const SHOWN = 120;
const COLORS: Record<string, number> = { plan: 4, decode: 1, prefill: 2, mixed: 3 };

let absent = false; // this server tells of no steps

async function newest(): Promise<Step[]> {
  if (absent) return [];
  try {
    return steps(spansIn(await json(`/trace/steps?last=${SHOWN}`)));
  } catch (error) {
    absent = error instanceof ApiError && [400, 403, 404, 501].includes(error.status);
    return [];
  }
}

/** Each step, with the planning before it. */
function steps(spans: Span[]): Step[] {
  const found: Step[] = [];
  let planS = 0;
  for (const { name, startS, endS, detail } of spans) {
    if (name === "plan") planS = endS - startS;
    else {
      found.push({ kind: name, planS, runS: endS - startS, at: startS, detail });
      planS = 0;
    }
  }
  return found.slice(-SHOWN);
}

export function Steps({ times, stepMs, perStep }: Props) {
  const { data } = usePoll(newest, EVERY_MS);
  return (
    <Card title="Steps" class={data?.length ? "wide-card" : ""}>
      {data && data.length > 0 && <Timeline steps={data} />}
      <Chart
        label="Steps of the scheduler"
        times={times}
        show={(value) => (value >= 1000 ? count(value) : digits(value))}
        series={[
          { name: "ms a step", values: stepMs, color: 1 },
          { name: "tokens a step", values: perStep, color: 2 },
        ]}
      />
    </Card>
  );
}

/** One bar per step; its height is the duration. Time between steps is left out. */
function Timeline({ steps: all }: { steps: Step[] }) {
  const [at, setAt] = useState<number>();
  const sorted = useMemo(() => all.map(({ planS, runS }) => planS + runS).sort((a, b) => a - b), [all]);
  const median = sorted[Math.floor(sorted.length / 2)] || 1e-9;
  const top = sorted[sorted.length - 1] || 1e-9;
  const kinds = [...new Set(all.map(({ kind }) => kind))];
  // log scale: a step of many prompts takes a hundred times as long as one of few tokens
  const share = (value: number) => (100 * Math.log1p((4 * value) / median)) / Math.log1p((4 * top) / median);
  const shown = at === undefined ? undefined : all[at];
  const spread = all[all.length - 1]!.at - all[0]!.at;
  return (
    <div class="timeline">
      <div class="step-bars" role="img" aria-label={`The ${all.length} newest steps took ${seconds(median)} each, as a median, and at most ${seconds(top)}.`} onPointerLeave={() => setAt(undefined)}>
        {all.map((step, i) => (
          <span class={i === at ? "step at" : "step"} onPointerEnter={() => setAt(i)}>
            <i class={`c${COLORS[step.kind] ?? 5}`} style={{ height: `${share(step.planS + step.runS) - share(step.planS)}%` }} />
            <i class="c4" style={{ height: `${share(step.planS)}%` }} />
          </span>
        ))}
      </div>
      <p class="legend">
        {[...kinds, "plan"].map((kind) => (
          <span class={`c${COLORS[kind] ?? 5}`}>
            <i /> {kind}
          </span>
        ))}
        <span class="when">{shown ? `${shown.kind}: ${seconds(shown.runS)}, planned in ${seconds(shown.planS)} ${words(shown.detail)}` : `${all.length} newest steps over ${seconds(spread)}; median ${seconds(median)}, longest ${seconds(top)}; heights are logarithmic`}</span>
      </p>
    </div>
  );
}

function words(detail: string | undefined): string {
  return (detail ?? "").replace(/[{}"]/g, "").replace(/[:,]/g, (sign) => `${sign} `);
}
