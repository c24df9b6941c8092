import { Connection } from "./components/connection";
import { Devices } from "./components/devices";
import { Notebook } from "./components/notebook";
import { PoolState } from "./components/pool_state";
import { Pools } from "./components/pools";
import { Runs } from "./components/runs";
import { Usage } from "./components/usage";
import { PanelContext, useRedraw } from "./context";
import type { PanelModel } from "./model";
import { rankWords, stageWord } from "./words";

/** The panel: the notebook in front above, the pool below. */
export function App({ model }: { model: PanelModel }) {
  useRedraw(model);
  const t = model.host.translate;
  const { session, notebook, pool } = model;
  const hasForm = (notebook?.kernel ?? null) !== null && notebook?.asksToConfirm === false;
  const state = session ? `${stageWord(session, t)} · ${rankWords(session, pool.picture, t)}` : t("Not connected");
  return (
    <PanelContext.Provider value={model}>
      <div class="sgpu-panel" role="region" aria-label={t("GPU environment")} data-notebook={notebook?.link.name ?? ""}>
        <h1>{t("GPU environment")}</h1>
        <div class="sgpu-hidden" role="status" aria-live="polite">
          {notebook ? state : ""}
        </div>
        {session && <Connection session={session} />}
        <PoolState />
        <Notebook />
        {!hasForm && pool.pools.length > 1 && <Pools />}
        <OrderSaid model={model} />
        <Devices />
        <Runs />
        <Usage />
      </div>
    </PanelContext.Provider>
  );
}

/** What became of an order to the pool. */
function OrderSaid({ model }: { model: PanelModel }) {
  const { said } = model.pool;
  const t = model.host.translate;
  if (!said || said.text === "") return null;
  return (
    <section class="sgpu-part sgpu-pair" aria-label={t("Answer")}>
      <span class={said.ok ? "sgpu-soft" : "sgpu-bad"} role={said.ok ? "status" : "alert"}>
        {said.text}
      </span>
      <button type="button" class="sgpu-word" aria-label={t("close")} onClick={() => model.dismissSaid()}>
        ×
      </button>
    </section>
  );
}
