import { useLayoutEffect, useState } from "preact/hooks";

import type { Ticker } from "../shared/ticker";
import { Code } from "./components/code";
import { About, Environment, Options, Parameters, Phases, ShippedNames } from "./components/facts";
import { Files } from "./components/files";
import { Mlflow } from "./components/mlflow";
import type { RunPageModel } from "./page_model";

/** The details of a run below its live view: code, files, options, phases and environment. */
export function RunPageApp({ model, ticker }: { model: RunPageModel; ticker: Ticker }) {
  const [, redraw] = useState(0);
  useLayoutEffect(() => model.subscribe(() => redraw((count) => count + 1)), [model]);
  const { page, files } = model;
  return (
    <article class="sgpu-page" aria-label="run page">
      {model.error !== "" && <p class="sgpu-bad">{`The run's page can't be updated: ${model.error}`}</p>}
      {page && (
        <div class="sgpu-page-columns">
          <div>
            <Code page={page} />
            {files && <Files model={model} files={files} />}
          </div>
          <div>
            <About page={page} />
            {page.mlflow && <Mlflow model={model} mlflow={page.mlflow} />}
            <Phases model={model} page={page} ticker={ticker} />
            <Options options={page.options} />
            <Parameters parameters={page.parameters} />
            <ShippedNames page={page} />
            <Environment environment={page.environment} />
          </div>
        </div>
      )}
    </article>
  );
}
