import { usePanel, useTranslate } from "../context";
import type { RunRow } from "../messages";
import { holdersOf } from "../queue";
import { holderLabel } from "../format";
import { EndRun } from "./end_run";

const MAX_HOLDERS = 4;

/** The runs that a queued run waits for, with buttons that end this user's own. */
export function Holders({ run, now }: { run: RunRow; now: number }) {
  const model = usePanel();
  const t = useTranslate();
  const isShown = model.pool.poolOf(run.run_id) === model.pool.name;
  // of other pools too few runs are known
  const holders = isShown ? holdersOf(run, model.pool.runs) : [];
  if (holders.length === 0) return null;
  const more = holders.length - MAX_HOLDERS;
  return (
    <ul class="sgpu-holders" aria-label={t("Held by")}>
      {holders.slice(0, MAX_HOLDERS).map(({ run: holder, idleSince_s }) => (
        <li key={holder.run_id} class="sgpu-pair">
          <small>{t("held by %1", holderLabel(holder, idleSince_s === null ? null : now - idleSince_s, run, t))}</small>
          {model.isMine(holder) && (
            <EndRun run={holder} label={holder.kind === "session" ? t("End that session") : t("End that run")} />
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
