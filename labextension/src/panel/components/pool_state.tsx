import { usePanel, useTranslate } from "../context";
import { StateCard } from "./state_card";

/** A problem of the pool or of the connection to it; not drawn if there is none. */
export function PoolState() {
  const model = usePanel();
  const t = useTranslate();
  const { link, pool } = model;
  const retryButton = (
    <button type="button" onClick={() => model.host.pools.retry()}>
      {t("Try again")}
    </button>
  );
  switch (link.kind) {
    case "absent":
      return (
        <StateCard
          title={link.text || t("This Jupyter server has no sgpu-magic.")}
          text={t("Install sgpu-magic where the Jupyter server runs, and restart the server.")}
          isBad
        >
          {retryButton}
        </StateCard>
      );
    case "refused":
      return (
        <StateCard title={link.text || t("The Jupyter server denies this page access to pools.")} isBad>
          {retryButton}
        </StateCard>
      );
    case "away":
      return (
        <StateCard title={link.text || t("The Jupyter server does not answer.")} text={t("Runs continue. This panel may be out of date.")} isBad>
          {retryButton}
        </StateCard>
      );
    case "connecting":
      if (!pool.snapshot) return <StateCard title={t("Looking for the pool…")} />;
      break;
    case "open":
      if (!pool.snapshot) return <StateCard title={t("Waiting for the pool's first update…")}>{retryButton}</StateCard>;
  }
  const { snapshot } = pool;
  if (snapshot.state === "up") return null;
  return (
    <StateCard title={snapshot.sentence} isBad={snapshot.state !== "none"}>
      {snapshot.remedy !== "" && (
        <button type="button" disabled={model.isStarting} onClick={() => model.runRemedy()}>
          {model.isStarting ? t("Starting…") : snapshot.remedy_words}
        </button>
      )}
    </StateCard>
  );
}
