// What the tours in JavaScript share; see steps.py.

export const MODEL = "sapling";
export const EMBEDDER = "tiny-bert";
export const KEY = "secret";
export const HELLO = [{ role: "user", content: "Hello" }];
export const WEATHER = {
  type: "object",
  properties: { city: { enum: ["Paris", "Rome"] }, days: { enum: [1, 2, 3] } },
  required: ["city", "days"],
  additionalProperties: false,
};
const call =
  '<tool_call>\\n\\{"name": "get_weather", "arguments": ' +
  '\\{"city": "(Paris|Rome)", "days": [1-3]\\}\\}\\n</tool_call>';
export const TWO_CALLS = `${call}\\n${call}`;

export function assert(condition, what = "assertion failed") {
  if (!condition) throw new Error(what);
}

export function check(args) {
  assert(["Paris", "Rome"].includes(args.city) && [1, 2, 3].includes(args.days), JSON.stringify(args));
}

export async function fails(kind, work) {
  try {
    await work();
  } catch (error) {
    assert(error instanceof kind, `${kind.name} expected, not ${error}`);
    return error;
  }
  throw new Error(`${kind.name} expected`);
}

export async function run(name, steps) {
  console.log(name);
  let failed = false;
  for (const step of steps) {
    try {
      await step();
      console.log(`  ok        ${step.name}`);
    } catch (error) {
      failed = true;
      console.log(`  FAILED    ${step.name}\n${error.stack}`);
    }
  }
  process.exit(failed ? 1 : 0);
}
