// Claude Code: one run that is not interactive.

import { execFile } from "node:child_process";
import { mkdtemp, rm } from "node:fs/promises";
import { homedir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { HELLO, KEY, MODEL, assert, run } from "./steps.mjs";

const url = process.argv[4];
const claude = fileURLToPath(new URL("node_modules/.bin/claude", import.meta.url));

async function oneTurn() {
  const home = await mkdtemp(join(homedir(), ".claude-tour-"));
  try {
    const child = promisify(execFile)(claude, ["-p", HELLO[0].content, "--output-format", "json"], {
      cwd: home,
      env: {
        PATH: process.env.PATH,
        HOME: home,
        CLAUDE_CONFIG_DIR: home,
        ANTHROPIC_BASE_URL: url,
        ANTHROPIC_AUTH_TOKEN: KEY,
        ANTHROPIC_MODEL: MODEL,
        ANTHROPIC_SMALL_FAST_MODEL: MODEL,
        CLAUDE_CODE_MAX_OUTPUT_TOKENS: "64",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC: "1",
        DISABLE_AUTOUPDATER: "1",
      },
      timeout: 400_000,
    });
    child.child.stdin.end();
    const found = JSON.parse((await child).stdout);
    assert(found.type === "result" && !found.is_error, JSON.stringify(found));
    assert(found.usage.input_tokens + found.usage.cache_read_input_tokens > 4096);
  } catch (error) {
    throw new Error(`${error.message}\n${error.stdout ?? ""}`);
  } finally {
    await rm(home, { recursive: true, force: true });
  }
}

await run("@anthropic-ai/claude-code", [oneTurn]);
