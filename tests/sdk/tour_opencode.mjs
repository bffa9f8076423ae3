// opencode: one run that is not interactive.

import { execFile } from "node:child_process";
import { mkdtemp, rm, writeFile } from "node:fs/promises";
import { homedir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { HELLO, KEY, MODEL, assert, run } from "./steps.mjs";

const url = process.argv[4];
const opencode = fileURLToPath(new URL("node_modules/.bin/opencode", import.meta.url));
const config = {
  $schema: "https://opencode.ai/config.json",
  autoupdate: false,
  share: "disabled",
  model: `sylvan/${MODEL}`,
  small_model: `sylvan/${MODEL}`,
  provider: {
    sylvan: {
      npm: "@ai-sdk/openai-compatible",
      options: { baseURL: `${url}/v1`, apiKey: KEY },
      models: { [MODEL]: { limit: { context: 32768, output: 64 } } },
    },
  },
};

async function oneTurn() {
  const home = await mkdtemp(join(homedir(), ".opencode-tour-"));
  try {
    await writeFile(join(home, "opencode.json"), JSON.stringify(config));
    const child = promisify(execFile)(opencode, ["run", "--format", "json", HELLO[0].content], {
      cwd: home,
      env: { PATH: process.env.PATH, HOME: home, OPENCODE_DISABLE_AUTOUPDATE: "1" },
      timeout: 400_000,
    });
    child.child.stdin.end();
    const events = (await child).stdout.trim().split("\n").map((line) => JSON.parse(line));
    assert(!events.some((event) => event.type === "error"), JSON.stringify(events));
    assert(events.some((event) => event.type === "step_finish"), JSON.stringify(events));
  } finally {
    await rm(home, { recursive: true, force: true });
  }
}

await run("opencode-ai", [oneTurn]);
