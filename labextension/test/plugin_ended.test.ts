import { Widget } from "@lumino/widgets";
import { afterEach, expect, it } from "vitest";

import { endedRunFactory } from "../src/plugin/ended_runs";
import { RUN_MIME, findEndedRun } from "../src/plugin/outputs";
import { RunServer } from "../src/plugin/run_server";
import { announceRunTabs } from "../src/shared/open_run";
import { endOfLog, registerViewState } from "../src/run_view/view_state";
import { eventually } from "./eventually";
import { line, snapshot } from "./samples";

const RECORD = { run_id: "7f3a00", name: "fit", state: "succeeded", whole: true };
const SAVED = "<b>the saved form</b>";
const SAVED_END = '<div class="sgpu-end"><span>run 7f3a</span></div>';

class SavedForm extends Widget {
  renderModel(): Promise<void> {
    this.node.innerHTML = SAVED + SAVED_END;
    return Promise.resolve();
  }
}

const outputs: Widget[] = [];

function draw(request: (path: string) => Response, record: unknown = RECORD): HTMLElement {
  const server = new RunServer((path) => Promise.resolve(request(path)));
  const factory = endedRunFactory(server, () => new SavedForm());
  const renderer = factory.createRenderer({} as never);
  outputs.push(renderer);
  document.body.append(renderer.node);
  void renderer.renderModel({ data: { [RUN_MIME]: record, "text/html": SAVED } } as never);
  return renderer.node;
}

function see(): void {
  const position = { ...endOfLog(), height_px: 480 };
  registerViewState("7f3a00", () => ({ position, snapshot: snapshot({ lines: [1, 0, 0, 0] }), rows: [[0, line(0, "loss 0.5")]] }));
}

function ending(path: string): Response {
  const final = snapshot({ seq: 3, final: true, ticking: false, state: "succeeded", lines: [1, 0, 0, 0] });
  if (path.endsWith("/ask")) return new Response(JSON.stringify({ kind: "hello", n: 1, snapshot: final, seq: 0 }));
  return new Response(JSON.stringify({ snapshot: final, updates: [], seq: 0, lines: 1, displays: 0, final: true }));
}

afterEach(() => {
  delete document.body.dataset["sgpuRunTabs"];
  for (const output of outputs.splice(0)) output.dispose();
});

it("draws the saved form of a run that this page has not shown", async () => {
  const node = draw(ending, { ...RECORD, run_id: "00000000" });
  await eventually(() => expect(node.innerHTML).toContain(SAVED));
  expect(node.querySelector(".sgpu-run")).toBeNull();
});

it("keeps the view that this page has shown, with its lines at once and its height", async () => {
  see();
  const node = draw(ending);
  await eventually(() => expect(node.querySelector(".sgpu-log")?.textContent).toContain("loss 0.5"));
  await eventually(() => expect(node.querySelector(".sgpu-state")?.textContent).toBe("succeeded"));
  expect(node.querySelector<HTMLElement>(".sgpu-run")?.style.minHeight).toBe("480px");
  expect(node.innerHTML).not.toContain(SAVED);
});

it("draws the saved form if the server does not have the run", async () => {
  see();
  const node = draw(() => new Response(JSON.stringify({ message: "no run 7f3a" }), { status: 404 }));
  await eventually(() => expect(node.innerHTML).toContain(SAVED));
  expect(node.querySelector(".sgpu-run")).toBeNull();
});

it("replaces only an output that shows a whole ended run", () => {
  expect(findEndedRun(RECORD)).toEqual({ run_id: "7f3a00", name: "fit" });
  for (const record of [{ ...RECORD, whole: false }, { ...RECORD, state: "running" }, { run_id: "7f3a00", state: "failed" }, "x", null]) {
    expect(findEndedRun(record)).toBeNull();
  }
});

it("adds a button that opens the run's tab to the saved form, in a page with such tabs", async () => {
  const other = { ...RECORD, run_id: "00000000" };
  const without = draw(ending, other);
  await eventually(() => expect(without.innerHTML).toContain(SAVED));
  expect(without.querySelector("button")).toBeNull();
  announceRunTabs();
  const node = draw(ending, other);
  await eventually(() => expect(node.querySelector(".sgpu-end")?.textContent).toBe("run 7f3a · Open in a tab"));
  expect(JSON.parse(node.querySelector("button")?.dataset["commandlinkerArgs"] ?? "")).toEqual({ run_id: "00000000", name: "fit" });
  const part = draw(ending, { ...other, whole: false });
  await eventually(() => expect(part.innerHTML).toContain(SAVED));
  expect(part.querySelector("button")).toBeNull();
});
