import type { Translate } from "../panel/host";
import type { PanelPool, RunRow } from "../panel/messages";
import { formatSpan, deadRanksLabel, ranksLabel, stageOf } from "../panel/format";

/** Returns the text of a notebook's toolbar button: `4 × A10 · connected · 12 min`, `4 × A10 · rank 1 dead`. */
export function chipLabel(session: RunRow, pool: PanelPool | null, now_s: number, t: Translate): string {
  const stage = stageOf(session);
  // it needs the user, and stays until the rank is restarted
  if (stage === "connected" && session.dead_ranks.length > 0) return `${ranksLabel(session, pool, t)} · ${deadRanksLabel(session, t)}`;
  const words = { waiting: "waiting", connecting: "connecting", connected: "connected", ending: "ending" };
  const pieces = [ranksLabel(session, pool, t), t(words[stage])];
  const since = stage === "connected" ? session.started_at : null;
  if (since !== null) pieces.push(formatSpan(now_s - since));
  return pieces.join(" · ");
}
