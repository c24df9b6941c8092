import { useNow, usePanel, useTranslate } from "../context";
import type { RunRow } from "../messages";
import { costWords, formatSpan, rankWords, stageOf, stageWord } from "../words";

/** The notebook's session: its state, how long, what it costs, when it ends by itself. */
export function Connection({ session }: { session: RunRow }) {
  const model = usePanel();
  const t = useTranslate();
  const { notebook, host, pool } = model;
  const now = useNow(true);
  const stage = stageOf(session);
  const isEnding = stage === "ending" || notebook?.doing === "disconnect" || model.cancelling.has(session.run_id);
  const since = session.started_at ?? session.submitted_at;
  const pieces = [
    stage === "connected" || session.words === "" ? "" : session.words,
    formatSpan(now - since),
    host.settings.showPrices ? costWords(session, now) : "",
    session.idle_ends_at === null ? "" : t("ends after %1", idleWords(session.idle_ends_at - now, t)),
  ];
  return (
    <section class="sgpu-part" aria-label={t("Session")} data-stage={stage}>
      <div class="sgpu-pair sgpu-top">
        <b class={stage === "connected" ? "sgpu-good" : "sgpu-plain"}>
          {stageWord(session, t)} · {rankWords(session, pool.picture, t)}
        </b>
        <button type="button" disabled={isEnding} onClick={() => void model.disconnect()}>
          {stage === "connected" || stage === "ending" ? t("Disconnect") : t("Cancel")}
        </button>
      </div>
      <small class="sgpu-soft sgpu-times">{pieces.filter(Boolean).join(" · ")}</small>
    </section>
  );
}

function idleWords(seconds: number, t: ReturnType<typeof useTranslate>): string {
  const left = Math.max(0, seconds);
  return left < 100 ? t("%1 idle s", Math.ceil(left)) : t("%1 idle min", Math.ceil(left / 60));
}
