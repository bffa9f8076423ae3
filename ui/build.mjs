// Builds the page into src/sylvan/ui/assets, with a digest of its sources.
import { createHash } from "node:crypto";
import { readFileSync, readdirSync, writeFileSync, copyFileSync, mkdirSync } from "node:fs";
import { dirname, join, relative, sep } from "node:path";
import { fileURLToPath } from "node:url";
import { build, context } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const out = join(here, "../src/sylvan/ui/assets");

const options = {
  absWorkingDir: here,
  entryPoints: { app: "src/main.tsx" },
  outdir: out,
  bundle: true,
  minify: true,
  format: "esm",
  target: ["es2022"],
  jsx: "automatic",
  jsxImportSource: "preact",
  legalComments: "none",
  logLevel: "info",
};

function files(folder) {
  return readdirSync(folder, { withFileTypes: true }).flatMap((entry) => {
    const path = join(folder, entry.name);
    return entry.isDirectory() ? files(path) : [path];
  });
}

// tests/repo/test_ui.py computes the same
function digest() {
  const made = ["build.mjs", "package.json", "package-lock.json", "tsconfig.json"];
  const names = [...made.map((name) => join(here, name)), ...files(join(here, "src"))]
    .map((path) => relative(here, path).split(sep).join("/"))
    .sort();
  const hash = createHash("sha256");
  for (const name of names) {
    hash.update(name + "\0");
    hash.update(readFileSync(join(here, name)));
    hash.update("\0");
  }
  return hash.digest("hex");
}

function licences() {
  return ["marked", "preact"]
    .map((name) => {
      const folder = join(here, "node_modules", name);
      const { version } = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
      const file = readdirSync(folder).find((entry) => /^licen[cs]e/i.test(entry));
      return `${name} ${version}\n\n${readFileSync(join(folder, file), "utf8").trim()}\n`;
    })
    .join("\n---\n\n");
}

function still() {
  mkdirSync(out, { recursive: true });
  for (const name of ["index.html", "icon.svg"]) copyFileSync(join(here, "src", name), join(out, name));
  writeFileSync(join(out, "licences.txt"), licences());
}

if (process.argv.includes("--watch")) {
  still();
  await (await context({ ...options, minify: false })).watch();
} else {
  await build(options);
  still();
  writeFileSync(join(out, "sources.sha256"), digest() + "\n");
}
