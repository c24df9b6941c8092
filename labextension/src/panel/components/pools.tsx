import { usePanelId, usePanel, useTranslate } from "../context";
import type { PoolChoice } from "../messages";

/** Selects the pool that the panel shows and that runs use. */
export function Pools() {
  const model = usePanel();
  const t = useTranslate();
  const id = usePanelId();
  const { pools } = model.pool;
  if (pools.length === 0) return null;
  const current = pools.find(({ name }) => name === model.poolName);
  const label = (pool: PoolChoice) => [pool.name, pool.about].filter(Boolean).join(" · ");
  return (
    <section class="sgpu-part sgpu-pair" aria-label={t("Pool")}>
      <label class="sgpu-heading" for={id}>
        {t("Pool")}
      </label>
      {pools.length === 1 && current ? (
        <output id={id} class="sgpu-clip">
          {label(current)}
        </output>
      ) : (
        <select id={id} value={model.poolName} onChange={(event) => model.choosePool(event.currentTarget.value)}>
          {!current && <option value={model.poolName}>{model.poolName || t("choose a pool")}</option>}
          {pools.map((pool) => (
            <option key={pool.name} value={pool.name}>
              {label(pool)}
            </option>
          ))}
        </select>
      )}
    </section>
  );
}
