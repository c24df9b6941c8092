// Builds the views that widgets carry, each into one file: `npm run build:view [-- --outdir=PATH]`.
// The same sources give the same bytes on every machine: no paths, no dates, no source map.
import { dirname, resolve } from "node:path";
import { fileURLToPath } from "node:url";

import { build } from "esbuild";

import { cssAsText } from "./css_as_text.mjs";

const here = dirname(fileURLToPath(import.meta.url));
const asked = process.argv.find((argument) => argument.startsWith("--outdir="));
const outdir = asked ? resolve(asked.slice("--outdir=".length)) : resolve(here, "../sgpu_magic/static");

await build({
  absWorkingDir: here,
  entryPoints: { run_view: "src/run_view/index.ts", panel: "src/panel/widget_entry.ts" },
  outdir,
  bundle: true,
  minify: true,
  format: "esm",
  target: "es2020",
  charset: "utf8",
  legalComments: "none",
  jsx: "automatic",
  jsxImportSource: "preact",
  plugins: [cssAsText],
  logLevel: "warning",
});
