import { useNow, usePanel, useTranslate } from "../context";
import type { RunRow } from "../messages";
import { costWords, formatMoment, formatSpan, rankWords, reasonOf, sessionLine, stageOf } from "../words";
import { HeldBy } from "./held_by";

/** Whether the active notebook has a session, in one line; below it details and actions. */
export function Connection() {
  const { session, endedSession } = usePanel();
  const t = useTranslate();
  if (session) return <Active session={session} />;
  if (endedSession) return <Ended session={endedSession} />;
  return (
    <section class="sgpu-part" aria-label={t("Session")} data-stage="none">
      <p class="sgpu-state-line sgpu-soft" role="status">
        {t("Not connected")}
      </p>
    </section>
  );
}

/** A session's state, how long it has lasted, what it costs, when it ends by itself. */
function Active({ session }: { session: RunRow }) {
  const model = usePanel();
  const t = useTranslate();
  const { notebook, host, pool } = model;
  const now = useNow(true);
  const stage = stageOf(session);
  const isEnding = stage === "ending" || notebook?.doing === "disconnect" || model.cancelling.has(session.run_id);
  const since = session.started_at ?? session.submitted_at;
  const line = sessionLine(session, pool.picture, model.poolName, t);
  const pieces = [
    stage === "connected" ? "" : reasonOf(session),
    formatSpan(now - since),
    host.settings.showPrices ? costWords(session, now) : "",
    session.simulated ? t("simulated") : "",
    session.idle_ends_at === null ? "" : t("ends after %1", idleWords(session.idle_ends_at - now, t)),
  ];
  return (
    <section class="sgpu-part" aria-label={t("Session")} data-stage={stage} tabIndex={-1}>
      <p class={`sgpu-state-line sgpu-clip ${stage === "connected" ? "sgpu-good" : "sgpu-plain"}`} role="status" title={line}>
        {line}
      </p>
      <div class="sgpu-pair">
        <small class="sgpu-soft sgpu-times">{pieces.filter(Boolean).join(" · ")}</small>
        <button type="button" disabled={isEnding} onClick={() => void model.disconnect()}>
          {t("End session")}
        </button>
      </div>
      <HeldBy run={session} now={now} />
    </section>
  );
}

/** How the last session ended, and a button that connects one like it. */
function Ended({ session }: { session: RunRow }) {
  const model = usePanel();
  const t = useTranslate();
  const { notebook, pool } = model;
  const devices = rankWords({ ...session, simulated: false }, pool.picture, t);
  const ended = session.ended_at === null ? "" : formatMoment(session.ended_at, pool.now_s);
  return (
    <section class="sgpu-part" aria-label={t("Session")} data-stage="ended">
      <div class="sgpu-pair">
        <p class="sgpu-state-line sgpu-plain" role="status">
          {t("Session ended")}
        </p>
        {model.canReconnect && (
          <button
            type="button"
            title={t("Connect %1 again", devices)}
            disabled={notebook?.doing !== "" || notebook.installing}
            onClick={() => model.reconnect()}
          >
            {t("Reconnect")}
          </button>
        )}
      </div>
      <small class="sgpu-soft sgpu-times">{[devices, ended, reasonOf(session)].filter(Boolean).join(" · ")}</small>
    </section>
  );
}

function idleWords(seconds: number, t: ReturnType<typeof useTranslate>): string {
  const left = Math.max(0, seconds);
  return left < 100 ? t("%1 idle s", Math.ceil(left)) : t("%1 idle min", Math.ceil(left / 60));
}
