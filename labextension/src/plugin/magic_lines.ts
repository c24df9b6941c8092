import type { RunRow } from "../panel/messages";

const ANY_TYPE = "any";
/** The session that a magic connects by default. */
const MAIN_SESSION = "main";

/**
 * Returns the line magic that connects a session like one that has ended.
 *
 * @param pool: The pool, "" for the one in the settings.
 */
export function connectLine(session: RunRow, pool: string): string {
  const name = session.name.replace(/^session /, "");
  const options = [
    ["--gpus", String(session.ranks)],
    ["--type", session.device_type === ANY_TYPE ? "" : session.device_type],
    ["--name", name === MAIN_SESSION ? "" : name],
    ["--pool", pool],
  ].filter(([, value]) => value !== "");
  return ["%sgpu_connect", ...options.flat()].join(" ");
}
