// Builds the JupyterLab and Notebook plugin as a prebuilt extension: `npm run build:plugin [-- --outdir=PATH]`.
// esbuild makes one module of our sources; JupyterLab's own builder wraps it, so that the application's packages are
// shared and not bundled. The same sources give the same bytes on every machine.
import { execFile } from "node:child_process";
import { cp, mkdir, readFile, rm, writeFile } from "node:fs/promises";
import { dirname, resolve } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";

import { build } from "esbuild";

import { cssAsText } from "./css_as_text.mjs";

const here = dirname(fileURLToPath(import.meta.url));
const asked = process.argv.find((argument) => argument.startsWith("--outdir="));
const outdir = asked ? resolve(asked.slice("--outdir=".length)) : resolve(here, "../sgpu_magic/labextension");
const lib = resolve(here, "lib");

await rm(lib, { recursive: true, force: true });
await build({
  absWorkingDir: here,
  entryPoints: ["src/plugin/index.ts"],
  outfile: resolve(lib, "plugin.js"),
  bundle: true,
  format: "esm",
  target: "es2022",
  charset: "utf8",
  legalComments: "none",
  jsx: "automatic",
  jsxImportSource: "preact",
  external: ["@jupyterlab/*", "@lumino/*"],
  plugins: [cssAsText],
  logLevel: "warning",
});

// what the builder needs to know, and no more: what it is given it copies beside its output
const { name, version, description, license, dependencies } = JSON.parse(
  await readFile(resolve(here, "package.json"), "utf8"),
);
const shared = Object.entries(dependencies).filter(([name]) => /^@(jupyterlab|lumino)\//.test(name));
const manifest = {
  name,
  version,
  description,
  license,
  main: "plugin.js",
  type: "module",
  dependencies: Object.fromEntries(shared),
  jupyterlab: {
    extension: true,
    outputDir: "out",
    schemaDir: "schema",
    webpackConfig: "builder.cjs",
    // any application from the oldest that is supported on, and not from the one that it was built against
    sharedPackages: Object.fromEntries(shared.map(([name, requiredVersion]) => [name, { requiredVersion }])),
  },
};
await mkdir(lib, { recursive: true });
await cp(resolve(here, "schema"), resolve(lib, "schema"), { recursive: true });
// else the number of a module comes from the path of this directory
await writeFile(resolve(lib, "builder.cjs"), 'module.exports = { optimization: { moduleIds: "natural" } };\n');
await writeFile(resolve(lib, "package.json"), `${JSON.stringify(manifest, null, 2)}\n`);
const builder = resolve(here, "node_modules/@jupyter/builder/lib/build-labextension.js");
const core = resolve(here, "node_modules/@jupyterlab/core-meta/core.package.json");
const run = promisify(execFile);
try {
  await run(process.execPath, [builder, "--core-package-file", core, lib], { cwd: here });
} catch (error) {
  process.stderr.write(`${error.stdout}${error.stderr}`);
  process.exit(1);
}
await rm(outdir, { recursive: true, force: true });
await cp(resolve(lib, "out"), outdir, { recursive: true });
