// Builds the run's view into one file: `npm run build:view [-- --outfile=PATH]`.
// The same sources give the same bytes on every machine: no paths, no dates, no source map.
import { dirname, resolve } from "node:path";
import { fileURLToPath } from "node:url";

import { build } from "esbuild";

import { cssAsText } from "./css_as_text.mjs";

const here = dirname(fileURLToPath(import.meta.url));
const asked = process.argv.find((argument) => argument.startsWith("--outfile="));
const outfile = asked ? resolve(asked.slice("--outfile=".length)) : resolve(here, "../sgpu_magic/static/run_view.js");

await build({
  absWorkingDir: here,
  entryPoints: ["src/run_view/index.ts"],
  outfile,
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
