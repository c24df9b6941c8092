// For esbuild: a style sheet is the text that it exports, made small.
import { readFile } from "node:fs/promises";

import { transform } from "esbuild";

export const cssAsText = {
  name: "css-as-text",
  setup(builder) {
    builder.onLoad({ filter: /\.css$/ }, async ({ path }) => {
      const { code } = await transform(await readFile(path, "utf8"), { loader: "css", minify: true });
      return { contents: code, loader: "text" };
    });
  },
};
