// Continue's command line with the recipe of deploy/platforms: one run that is not interactive.

import { execFile } from "node:child_process";
import { mkdtemp, readFile, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import { HELLO, KEY, MODEL, assert, run } from "./steps.mjs";

const url = process.argv[4];
const cn = fileURLToPath(new URL("node_modules/.bin/cn", import.meta.url));

async function oneMessage() {
  const home = await mkdtemp(join(tmpdir(), "continue-tour-"));
  try {
    const config = join(home, "config.yaml");
    const recipe = await readFile("deploy/platforms/continue.yaml", "utf8"); // of the checkout
    await writeFile(
      config,
      recipe
        .replace("http://127.0.0.1:30000", url)
        .replace("apiKey: none", `apiKey: ${KEY}`)
        .replace("model: Qwen3-8B", `model: ${MODEL}`),
    );
    const child = promisify(execFile)(cn, ["--config", config, "--print", HELLO[0].content], {
      cwd: home,
      env: { ...process.env, HOME: home, CONTINUE_GLOBAL_DIR: home, CONTINUE_TELEMETRY_ENABLED: "0" },
      timeout: 300_000,
    });
    child.child.stdin.end();
    const { stdout } = await child;
    assert(stdout.trim(), "it has said nothing");
  } finally {
    await rm(home, { recursive: true, force: true });
  }
}

await run("@continuedev/cli", [oneMessage]);
