import { usePanel, useTranslate } from "../context";

/** The usage of this month, and the pool's description. */
export function Usage() {
  const { pool } = usePanel();
  const t = useTranslate();
  const { picture } = pool;
  if (!picture) return null;
  // `PoolState` shows the sentence of a pool that is not up
  const sentence = picture.state === "up" ? picture.sentence : "";
  const lines = [picture.usage, sentence, picture.about].filter(Boolean);
  if (lines.length === 0) return null;
  return (
    <section class="sgpu-part sgpu-soft sgpu-usage" aria-label={t("Usage")}>
      {lines.map((line) => (
        <p key={line}>{line}</p>
      ))}
    </section>
  );
}
