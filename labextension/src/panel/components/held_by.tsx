import { usePanel, useTranslate } from "../context";
import type { RunRow } from "../messages";
import { holdersOf } from "../queue";
import { holderWords } from "../words";
import { EndRun } from "./end_run";

const MOST = 4;

/** The runs that a queued run waits for; this user's own can be ended here. */
export function HeldBy({ run, now }: { run: RunRow; now: number }) {
  const model = usePanel();
  const t = useTranslate();
  const holders = holdersOf(run, model.pool.runs);
  if (holders.length === 0) return null;
  const more = holders.length - MOST;
  return (
    <ul class="sgpu-held" aria-label={t("Held by")}>
      {holders.slice(0, MOST).map(({ run: holder, idleSince_s }) => (
        <li key={holder.run_id} class="sgpu-pair">
          <small>{t("held by %1", holderWords(holder, idleSince_s === null ? null : now - idleSince_s, run, t))}</small>
          {model.isMine(holder) && (
            <EndRun run={holder} words={holder.kind === "session" ? t("End that session") : t("End that run")} />
          )}
        </li>
      ))}
      {more > 0 && (
        <li>
          <small>{t("and %1 more", more)}</small>
        </li>
      )}
    </ul>
  );
}
