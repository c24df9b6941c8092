import { useLayoutEffect, useState } from "preact/hooks";

import type { Ticker } from "../../shared/ticker";
import { formatBytes, formatElapsed } from "../../shared/units";
import type { RunPageModel } from "../page_model";
import type { EnvironmentChanges, NamedText, RunPage } from "../records";
import { Table } from "./table";

/** When the run was submitted and started, its devices and its cost. */
export function About({ page }: { page: RunPage }) {
  const rows: readonly (readonly [string, string])[] = [
    ["devices", page.devices.join(" · ")],
    ["submitted", formatTime(page.submitted_at)],
    ["started", page.started_at === null ? "" : formatTime(page.started_at)],
    ["cost", page.cost],
  ];
  return <Table title="Run" rows={rows.filter(([, value]) => value !== "")} />;
}

/** Returns `30 Nov 2026, 10:41:07`, in the browser's time zone. */
export function formatTime(at_s: number): string {
  return new Date(at_s * 1000).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "medium" });
}

export function Options({ options }: { options: readonly NamedText[] }) {
  return <Table title="Options" rows={options.map(({ name, value }) => [name, value])} />;
}

export function Parameters({ parameters }: { parameters: readonly NamedText[] }) {
  return <Table title="Parameters" rows={parameters.map(({ name, value }) => [name, value])} />;
}

/** The duration of each phase; that of the current phase keeps growing. */
export function Phases({ model, page, ticker }: { model: RunPageModel; page: RunPage; ticker: Ticker }) {
  const [, redraw] = useState(0);
  const isActive = page.phases.some(({ current }) => current);
  useLayoutEffect(() => {
    if (!isActive) return;
    return ticker.subscribe(() => redraw((count) => count + 1));
  }, [isActive, ticker]);
  const phases = page.phases.map(({ name, seconds, current }) => ({
    name,
    current,
    seconds: seconds + (current ? model.age_s : 0),
  }));
  const longest_s = Math.max(...phases.map(({ seconds }) => seconds), 0.001);
  return (
    <section aria-label="phases">
      <h3>Phases</h3>
      <table>
        <tbody>
          {phases.map(({ name, seconds, current }) => (
            <tr key={name} class={current ? "sgpu-busy" : ""}>
              <th scope="row">{name}</th>
              <td class="sgpu-page-number">{formatElapsed(seconds)}</td>
              <td class="sgpu-phase-bar" aria-hidden="true">
                <i style={{ width: `${(100 * seconds) / longest_s}%` }} />
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </section>
  );
}

/** The names that were sent to the ranks, largest first. */
export function ShippedNames({ page }: { page: RunPage }) {
  const names = [...page.shipped].sort((a, b) => (b.size ?? -1) - (a.size ?? -1));
  return (
    <Table
      title="Shipped"
      note={page.shipped.length > 0 ? `${formatBytes(page.shipped_bytes)} in total` : ""}
      rows={names.map(({ name, size }) => [name, size === null ? "" : formatBytes(size)])}
    />
  );
}

/** The differences from the environment of the notebook's previous run. */
export function Environment({ environment }: { environment: EnvironmentChanges | null }) {
  if (!environment) return null;
  const { run, changes } = environment;
  return (
    <section aria-label="environment">
      <h3>Environment</h3>
      {changes.length === 0 ? (
        <p>The same as in the notebook's previous run, {run}.</p>
      ) : (
        <table>
          <thead>
            <tr>
              <td />
              <th scope="col">run {run}</th>
              <th scope="col">this run</th>
            </tr>
          </thead>
          <tbody>
            {changes.map(({ name, before, after }) => (
              <tr key={name}>
                <th scope="row">{name}</th>
                <td>{before || "–"}</td>
                <td>{after || "–"}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </section>
  );
}
