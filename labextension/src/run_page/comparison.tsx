import { useEffect, useMemo, useState } from "preact/hooks";

import { formatElapsed } from "../shared/units";
import { formatTime } from "./components/facts";
import { diffLines } from "./line_diff";
import type { PageServer } from "./page_model";
import type { NamedText, RunPage } from "./records";

interface Props {
  readonly runs: readonly [string, string];
  readonly server: PageServer;
  readonly signal: AbortSignal;
}

type Pair = readonly [RunPage, RunPage];

/** Two runs side by side: state, options, parameters, metrics, and the difference of their code. */
export function ComparisonApp({ runs, server, signal }: Props) {
  const [pages, setPages] = useState<Pair | null>(null);
  const [error, setError] = useState("");
  const load = (): void => {
    Promise.all([server.page(runs[0], signal), server.page(runs[1], signal)]).then(
      ([first, second]) => {
        setPages([first, second]);
        setError("");
      },
      (reason: unknown) => setError(reason instanceof Error ? reason.message : String(reason)),
    );
  };
  useEffect(load, [runs[0], runs[1]]);
  return (
    <article class="sgpu-page" aria-label="comparison">
      {error !== "" && <p class="sgpu-bad">{`The runs can't be compared: ${error}`}</p>}
      {pages && <ComparisonTable pages={pages} onRefresh={load} />}
    </article>
  );
}

function ComparisonTable({ pages, onRefresh }: { pages: Pair; onRefresh: () => void }) {
  const [first, second] = pages;
  return (
    <>
      <table class="sgpu-pair-table">
        <thead>
          <tr>
            <td>
              <button type="button" onClick={onRefresh}>
                Refresh
              </button>
            </td>
            {pages.map((page) => (
              <th key={page.run_id} scope="col">
                {page.name} <small>{shortId(page)}</small>
              </th>
            ))}
          </tr>
        </thead>
        <Rows title="Run" pages={pages} valuesOf={runFacts} />
        <Rows title="Last metrics" pages={pages} valuesOf={(page) => page.metrics} />
        <Rows title="Parameters" pages={pages} valuesOf={(page) => page.parameters} />
        <Rows title="Options" pages={pages} valuesOf={(page) => page.options.map(withSwitchValue)} />
      </table>
      <CodeDifference before={first} after={second} />
    </>
  );
}

function runFacts(page: RunPage): readonly NamedText[] {
  const total_s = page.phases.filter(({ name }) => name === "running").reduce((sum, { seconds }) => sum + seconds, 0);
  return [
    { name: "state", value: page.state },
    { name: "devices", value: page.devices.join(" · ") },
    { name: "started", value: page.started_at === null ? "" : formatTime(page.started_at) },
    { name: "running", value: total_s > 0 ? formatElapsed(total_s) : "" },
    { name: "cost", value: page.cost },
  ];
}

/** Gives a switch the value `set`: without a value it would look like an option that is not set. */
function withSwitchValue({ name, value }: NamedText): NamedText {
  return { name, value: value === "" ? "set" : value };
}

interface RowsProps {
  readonly title: string;
  readonly pages: Pair;
  readonly valuesOf: (page: RunPage) => readonly NamedText[];
}

/** A group of rows, each with a value of both runs; rows with different values are marked. */
function Rows({ title, pages, valuesOf }: RowsProps) {
  const values = pages.map((page) => new Map(valuesOf(page).map(({ name, value }) => [name, value])));
  const names = [...new Set(values.flatMap((each) => [...each.keys()]))];
  const rows = names
    .map((name) => ({ name, both: values.map((each) => each.get(name) ?? "") }))
    .filter(({ both }) => both.some((value) => value !== ""));
  if (rows.length === 0) return null;
  return (
    <tbody aria-label={title.toLowerCase()}>
      <tr>
        <th scope="rowgroup" colSpan={3}>
          {title}
        </th>
      </tr>
      {rows.map(({ name, both }) => (
        <tr key={name} class={both[0] === both[1] ? "" : "sgpu-differs"}>
          <th scope="row">{name}</th>
          {both.map((value, index) => (
            <td key={index}>{value || "–"}</td>
          ))}
        </tr>
      ))}
    </tbody>
  );
}

function CodeDifference({ before, after }: { before: RunPage; after: RunPage }) {
  const lines = useMemo(() => diffLines(codeOf(before), codeOf(after)), [before, after]);
  const changed = lines.filter(({ sign }) => sign !== " ").length;
  return (
    <section class="sgpu-page-code" aria-label="code difference">
      <h3>
        Code <small>{changed === 0 ? "the same in both runs" : `− ${label(before)} · + ${label(after)}`}</small>
      </h3>
      <pre>
        {lines.map(({ sign, text }, index) => (
          <div key={index} class={`sgpu-diff-${{ " ": "same", "-": "old", "+": "new" }[sign]}`}>
            {`${sign === "-" ? "−" : sign} ${text}`}
          </div>
        ))}
      </pre>
    </section>
  );
}

function shortId(page: RunPage): string {
  return page.run_id.slice(0, 4);
}

function label(page: RunPage): string {
  return `${page.name} ${shortId(page)}`;
}

function codeOf(page: RunPage): string {
  return [page.magic_line, ...page.code.map(({ text }) => text.replace(/\n$/, ""))].filter((text) => text !== "").join("\n");
}
