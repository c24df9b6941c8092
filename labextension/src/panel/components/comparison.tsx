import { useLayoutEffect, useRef } from "preact/hooks";

import { usePanel, useTranslate } from "../context";
import type { RunRow } from "../messages";
import { formatCost, formatMoment, ranksLabel, runLabel, runDuration } from "../format";

interface Props {
  /** Two runs, or one until the other is chosen. */
  readonly runs: readonly RunRow[];
  readonly now: number;
  readonly onClose: () => void;
}

/** Two runs side by side: devices, duration, cost and parameters. */
export function Comparison({ runs, now, onClose }: Props) {
  const { pool, host } = usePanel();
  const t = useTranslate();
  const [first, second] = runs;
  const box = useRef<HTMLDivElement>(null);
  // the pressed button may be far below the table
  useLayoutEffect(() => box.current?.scrollIntoView({ block: "nearest" }), [second?.run_id]);
  if (!first) return null;
  const closeButton = (
    <button type="button" class="sgpu-text" aria-label={t("Close the comparison")} onClick={onClose}>
      ×
    </button>
  );
  if (!second) {
    return (
      <div class="sgpu-pair sgpu-top sgpu-comparing" role="status">
        <small>{t("Compare %1 with: choose Compare at another run.", runLabel(first))}</small>
        {closeButton}
      </div>
    );
  }
  const price = (run: RunRow): string => (host.settings.showPrices ? formatCost(run, now) : "");
  const rows: readonly (readonly [string, (run: RunRow) => string])[] = [
    [t("run"), ({ short_id }) => short_id],
    [t("state"), ({ state }) => t(state)],
    [t("devices"), (run) => ranksLabel(run, pool.snapshot, t)],
    [t("started"), ({ started_at }) => (started_at === null ? "" : formatMoment(started_at, now))],
    [t("duration"), (run) => runDuration(run, now)],
    [t("cost"), price],
    [t("user"), ({ user }) => user],
    ...parameterNames(first, second).map((name) => [name, (run: RunRow) => parameter(run, name)] as const),
  ];
  return (
    <div ref={box} class="sgpu-comparing">
      <table class="sgpu-comparison">
        <caption class="sgpu-hidden">{t("Two runs compared")}</caption>
        <thead>
          <tr>
            <td>{closeButton}</td>
            <th scope="col">{runLabel(first)}</th>
            <th scope="col">{runLabel(second)}</th>
          </tr>
        </thead>
        <tbody>
          {rows.map(([name, value], index) => {
            const values = [value(first), value(second)] as const;
            if (values.every((each) => each === "")) return null;
            return (
              <tr key={`${index} ${name}`} class={values[0] === values[1] ? "" : "sgpu-unequal"}>
                <th scope="row">{name}</th>
                <td>{values[0] || "–"}</td>
                <td>{values[1] || "–"}</td>
              </tr>
            );
          })}
        </tbody>
      </table>
    </div>
  );
}

function parameterNames(...runs: readonly RunRow[]): string[] {
  return [...new Set(runs.flatMap(({ parameters }) => parameters.map(({ name }) => name)))];
}

function parameter(run: RunRow, name: string): string {
  return run.parameters.find((each) => each.name === name)?.value ?? "";
}
