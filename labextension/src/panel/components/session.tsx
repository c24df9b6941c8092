import { useNow, usePanel, useTranslate } from "../context";
import type { Translate } from "../host";
import type { RunRow } from "../messages";
import { deadRanksLabel, formatCost, formatMoment, formatSpan, ranksLabel, sessionLine, stageOf } from "../format";
import { Holders } from "./holders";

/** The active notebook's session: its state in one line, with details and actions below. */
export function Session() {
  const { session, endedSession } = usePanel();
  const t = useTranslate();
  if (session) return <ActiveSession session={session} />;
  if (endedSession) return <EndedSession session={endedSession} />;
  return (
    <section class="sgpu-part" aria-label={t("Session")} data-stage="none">
      <p class="sgpu-state-line sgpu-soft" role="status">
        {t("Not connected")}
      </p>
    </section>
  );
}

/** A session's state, duration, cost, and idle timeout. */
function ActiveSession({ session }: { session: RunRow }) {
  const model = usePanel();
  const t = useTranslate();
  const { notebook, host, pool } = model;
  const now = useNow(true);
  const stage = stageOf(session);
  const isEnding = stage === "ending" || notebook?.pendingAction === "disconnect" || model.cancelling.has(session.run_id);
  const since = session.started_at ?? session.submitted_at;
  const line = sessionLine(session, pool.snapshot, model.poolName, t);
  const facts = [
    stage === "connected" ? "" : session.reason,
    formatSpan(now - since),
    host.settings.showPrices ? formatCost(session, now) : "",
    session.simulated ? t("simulated") : "",
    session.idle_ends_at === null ? "" : t("ends after %1", idleLabel(session.idle_ends_at - now, t)),
  ];
  return (
    <section class="sgpu-part" aria-label={t("Session")} data-stage={stage} tabIndex={-1}>
      <p class={`sgpu-state-line sgpu-clip ${stage === "connected" ? "sgpu-good" : "sgpu-plain"}`} role="status" title={line}>
        {line}
      </p>
      {stage === "connected" && session.dead_ranks.length > 0 && (
        <p class="sgpu-bad" role="status">
          {t("%1: %sgpu_restart replaces dead ranks", deadRanksLabel(session, t))}
        </p>
      )}
      <div class="sgpu-pair">
        <small class="sgpu-soft sgpu-times">{facts.filter(Boolean).join(" · ")}</small>
        <button type="button" disabled={isEnding} onClick={() => void model.disconnect()}>
          {t("End session")}
        </button>
      </div>
      <Holders run={session} now={now} />
    </section>
  );
}

/** Why the last session ended, with a button that connects a session with the same devices. */
function EndedSession({ session }: { session: RunRow }) {
  const model = usePanel();
  const t = useTranslate();
  const { notebook, pool } = model;
  const devices = ranksLabel({ ...session, simulated: false }, pool.snapshot, t);
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
            disabled={notebook?.pendingAction !== "" || notebook.isInstalling}
            onClick={() => model.reconnect()}
          >
            {t("Reconnect")}
          </button>
        )}
      </div>
      <small class="sgpu-soft sgpu-times">{[devices, ended, session.reason].filter(Boolean).join(" · ")}</small>
    </section>
  );
}

function idleLabel(seconds: number, t: Translate): string {
  const left = Math.max(0, seconds);
  return left < 100 ? t("%1 idle s", Math.ceil(left)) : t("%1 idle min", Math.ceil(left / 60));
}
