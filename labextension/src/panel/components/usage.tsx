import { usePanel, useTranslate } from "../context";

/** This month's usage, and the pool's description. */
export function Usage() {
  const { pool } = usePanel();
  const t = useTranslate();
  const { snapshot } = pool;
  if (!snapshot) return null;
  // `PoolState` shows the sentence of a pool that is not up
  const sentence = snapshot.state === "up" ? snapshot.sentence : "";
  const lines = [snapshot.usage, sentence, snapshot.about].filter(Boolean);
  if (lines.length === 0) return null;
  return (
    <section class="sgpu-part sgpu-soft sgpu-usage" aria-label={t("Usage")}>
      {lines.map((line) => (
        <p key={line}>{line}</p>
      ))}
    </section>
  );
}
