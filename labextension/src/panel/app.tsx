import { Session } from "./components/session";
import { Devices } from "./components/devices";
import { Notebook } from "./components/notebook";
import { PoolState } from "./components/pool_state";
import { Pools } from "./components/pools";
import { Runs } from "./components/runs";
import { Usage } from "./components/usage";
import { Variables } from "./components/variables";
import { PanelContext, useRedraw } from "./context";
import type { PanelModel } from "./model";

/** The panel: the active notebook at the top, the pool below. */
export function App({ model }: { model: PanelModel }) {
  useRedraw(model);
  const t = model.host.translate;
  const { notebook, pool } = model;
  const hasForm = (notebook?.kernel ?? null) !== null && notebook?.needsConfirmation === false;
  return (
    <PanelContext.Provider value={model}>
      <div class="sgpu-panel" role="region" aria-label={t("GPU environment")} data-notebook={notebook?.link.name ?? ""}>
        <div class="sgpu-content">
          <h1>{t("GPU environment")}</h1>
          {notebook && <Session />}
          {notebook && <Variables />}
          <PoolState />
          <Notebook />
          {!hasForm && pool.pools.length > 1 && <Pools />}
          <CommandNotice model={model} />
          <Devices />
          {/* above the runs, of which there may be a thousand */}
          <Usage />
          <Runs />
        </div>
      </div>
    </PanelContext.Provider>
  );
}

/** The result of an order to the pool. */
function CommandNotice({ model }: { model: PanelModel }) {
  const { result } = model.pool;
  const t = model.host.translate;
  if (!result || result.text === "") return null;
  return (
    <section class="sgpu-part sgpu-pair" aria-label={t("Answer")}>
      <span class={result.ok ? "sgpu-soft" : "sgpu-bad"} role={result.ok ? "status" : "alert"}>
        {result.text}
      </span>
      <button type="button" class="sgpu-text" aria-label={t("close")} onClick={() => model.dismissNotice()}>
        ×
      </button>
    </section>
  );
}
