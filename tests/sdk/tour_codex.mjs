// Codex CLI as it comes: one run that is not interactive.

import { execFile } from "node:child_process";
import { mkdtemp, rm, writeFile } from "node:fs/promises";
import { homedir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { HELLO, KEY, MODEL, assert, run } from "./steps.mjs";

const url = process.argv[4];
const codex = fileURLToPath(new URL("node_modules/.bin/codex", import.meta.url));
const config = `
model = "${MODEL}"
model_provider = "sylvan"

[model_providers.sylvan]
name = "Sylvan"
base_url = "${url}/v1"
env_key = "SYLVAN_KEY"
wire_api = "responses"
`;

async function oneTurn() {
  const home = await mkdtemp(join(homedir(), ".codex-tour-"));
  try {
    await writeFile(join(home, "config.toml"), config);
    const flags = ["exec", "--json", "--skip-git-repo-check", "--sandbox", "read-only"];
    const child = promisify(execFile)(codex, [...flags, HELLO[0].content], {
      cwd: home,
      env: { ...process.env, CODEX_HOME: home, SYLVAN_KEY: KEY },
      timeout: 300_000,
    });
    child.child.stdin.end();
    const events = (await child).stdout.trim().split("\n").map((line) => JSON.parse(line));
    const done = events.find((event) => event.type === "turn.completed");
    assert(done, JSON.stringify(events));
    assert(done.usage.input_tokens > 4096, "Codex tells of its tools");
    const items = events.filter((event) => event.type === "item.completed").map((event) => event.item);
    assert(items.some((item) => item.type === "agent_message" && item.text), JSON.stringify(items));
  } finally {
    await rm(home, { recursive: true, force: true });
  }
}

await run("@openai/codex", [oneTurn]);
