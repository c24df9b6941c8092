import { describe, expect, it } from "vitest";

import {
  canonicalName,
  packageLines,
  requirementProblem,
  resolveChoice,
  sameChoice,
  undoLine,
  withPackage,
  withType,
  withoutLine,
} from "../src/panel/form";
import type { PackageLine } from "../src/panel/messages";
import { EVERY_RUN, filterRuns, notebooksOf, parseFilter } from "../src/panel/run_filter";
import type { TimeFilter } from "../src/panel/run_filter";
import { formatCost, formatEstimate, formatMemory, formatSpan, runSummary, shapeOf } from "../src/panel/format";
import { interpolate } from "../src/panel/widget_host";
import { B300, CPUS, H100, NOW, RUNS, SESSION, choice, manyRuns, poolSnapshot, run, type } from "./panel_samples";

describe("a requirement", () => {
  it.each(["peft", "peft==0.17.1", "peft >=0.1, <1", "peft[all]~=0.17", "a.b_c-d", "peft; python_version < '3.13'", " peft ", ""])(
    "is valid: %j",
    (text) => expect(requirementProblem(text)).toBe(""),
  );
  it.each(["peft @ https://example.org/peft.whl", "peft@git+https://example.org/peft.git@v1"])("is valid: %j", (text) =>
    expect(requirementProblem(text)).toBe(""),
  );
  it.each([
    ["peft 0.17", "write name==version"],
    ["peft=0.17", "two equals signs"],
    ["peft torch", "one package at a time"],
    ["-r requirements.txt", "requirements file"],
    ["./wheels/peft.whl", "is a path"],
    ["==1", "write one as"],
    ["peft==", "write one as"],
  ])("is invalid: %j", (text, words) => expect(requirementProblem(text)).toContain(words));

  it("has a normalized name", () => {
    expect(canonicalName("Scikit_Learn[all]>=1")).toBe("scikit-learn");
    expect(canonicalName("zope.interface")).toBe("zope-interface");
  });
});

describe("the form's packages", () => {
  const peft: PackageLine = { sign: "+", name: "peft", words: "peft 0.17.1", removable: true };
  const torch: PackageLine = { sign: "-", name: "torch", words: "torch 2.7.1", removable: true };
  const effect = choice({ dependencies: ["peft==0.17.1"], removed: ["torch"] });

  it("replace another version, and are no longer removed", () => {
    const form = withPackage(withPackage(effect, "PEFT>=1"), "torch==2.8");
    expect(form.dependencies).toEqual(["PEFT>=1", "torch==2.8"]);
    expect(form.removed).toEqual([]);
  });

  it("show pending changes, each of which can be undone", () => {
    const words = (form: typeof effect) => packageLines([peft, torch], effect, form).map(({ sign, words, pending }) => `${sign} ${words} ${pending}`);
    expect(words(effect)).toEqual(["+ peft 0.17.1 ", "- torch 2.7.1 "]);
    const without = withoutLine(effect, peft);
    expect(without.dependencies).toEqual([]);
    expect(words(without)).toEqual(["+ peft 0.17.1 dropped", "- torch 2.7.1 "]);
    const line = packageLines([peft, torch], effect, without)[0];
    expect(line && undoLine(without, effect, line)).toEqual(effect);
    const back = withoutLine(effect, torch);
    expect(words(back)).toEqual(["+ peft 0.17.1 ", "- torch 2.7.1 dropped"]);
    const added = withPackage(effect, "einops");
    expect(words(added)).toEqual(["+ peft 0.17.1 ", "- torch 2.7.1 ", "+ einops added"]);
    const einops = packageLines([peft, torch], effect, added)[2];
    expect(einops && sameChoice(undoLine(added, effect, einops), effect)).toBe(true);
    expect(words(withPackage(effect, "peft==1"))).toEqual(["- torch 2.7.1 ", "+ peft==1 added"]);
  });

  it("are removed by name if they were installed by hand", () => {
    const form = withoutLine(choice(), peft);
    expect(form.removed).toEqual(["peft"]);
    expect(packageLines([peft], choice(), form).map(({ pending }) => pending)).toEqual(["dropped"]);
  });

  it("are only the requested ones with another base", () => {
    const lines = packageLines([peft, torch], effect, { ...effect, env_version: "4", removed: [] });
    expect(lines.map(({ words, pending }) => [words, pending])).toEqual([["peft==0.17.1", "added"]]);
  });
});

describe("type and number", () => {
  const none = choice({ gpus: 0, type: "" });

  it("default to all devices of the pool's only type", () => {
    expect(resolveChoice(none, poolSnapshot({ types: [type(), CPUS] }))).toMatchObject({ type: "a10", gpus: 4 });
    expect(resolveChoice(none, poolSnapshot({ types: [CPUS] }))).toMatchObject({ type: "cpu", gpus: 2 });
    expect(resolveChoice(none, poolSnapshot({ types: [H100, type()] }))).toMatchObject({ type: "a10", gpus: 1 });
    expect(resolveChoice(none, poolSnapshot({ types: [H100, type({ free: 0 })] }))).toMatchObject({ type: "h100", gpus: 1 });
    expect(resolveChoice(none, null)).toEqual(none);
    expect(resolveChoice(choice({ gpus: 1 }), poolSnapshot())).toMatchObject({ type: "a10", gpus: 1 });
  });

  it("change together", () => {
    expect(withType(choice({ gpus: 4 }), H100)).toMatchObject({ type: "h100", gpus: 4 });
    expect(withType(choice({ gpus: 4 }), B300)).toMatchObject({ type: "b300", gpus: 1 });
    expect(withType(none, CPUS)).toMatchObject({ type: "cpu", gpus: 2 });
  });
});

describe("labels", () => {
  it("round estimates, and show memory as the vendor states it", () => {
    expect([12, 99, 100, 719, 3599, 3900].map(formatSpan)).toEqual(["12 s", "99 s", "2 min", "12 min", "1 h 00 min", "1 h 05 min"]);
    expect([3, 31, 60, 720].map(formatEstimate)).toEqual(["10 s", "40 s", "1 min", "12 min"]);
    expect([24e9, 0.5e9, 2e9].map(formatMemory)).toEqual(["24 GB", "0.5 GB", "2 GB"]);
    // what the drivers of an A10, an H100, an A100 with 40 GB, an H200 and a slice of an A100 report, in MiB
    const reported = [23028, 81559, 40960, 143771, 4864].map((mib) => formatMemory(mib * 2 ** 20));
    expect(reported).toEqual(["24 GB", "80 GB", "40 GB", "141 GB", "5 GB"]);
  });

  it("show how long a run has run, or when it ended", () => {
    const words = RUNS.map((each) => runSummary(each, NOW, interpolate));
    expect(words[0]).toBe("2 ranks · running 2 min 14 s");
    expect(words[1]).toBe("4 ranks · waits for 1 A10, position 1");
    expect(words[2]).toMatch(/^rank 1: ValueError · (\d\d:\d\d|\d+ \w+)$/);
    expect(words[3]).toMatch(/^2 ranks · 3 min 36 s · (\d\d:\d\d|\d+ \w+)$/);
    expect(runSummary(SESSION, NOW, interpolate)).toBe("2 ranks · connected 12 min 00 s");
    const slow = { ...SESSION, metered_at: (SESSION.started_at ?? NOW) - 25 };
    expect(runSummary(slow, NOW, interpolate)).toBe("2 ranks · connected 12 min 00 s · start 25 s");
    expect(RUNS.map(shapeOf)).toEqual(["dot", "ring", "cross", "check"]);
  });

  it("show the running cost, the final cost, or no cost", () => {
    expect(formatCost(SESSION, NOW)).toBe("$1.00");
    expect(formatCost(run("x", { final: true, cost: 0.3 }), NOW)).toBe("$0.30");
    expect(formatCost(run("x", { hourly: null }), NOW)).toBe("");
  });
});

describe("the filter", () => {
  const runs = [...RUNS, ...manyRuns(20)];
  const poolOf = (id: string) => (id === runs[0]?.run_id ? "lab" : "local");
  const names = (change: Partial<typeof EVERY_RUN>) =>
    filterRuns(runs, { ...EVERY_RUN, ...change }, "train.ipynb", "kernel-1", NOW, poolOf).map(({ name }) => name);

  it("matches words, state, notebook and pool", () => {
    expect(names({ text: "lab" })).toEqual([runs[0]?.name]);
    expect(filterRuns(runs, EVERY_RUN, "", "", NOW, poolOf)).toBe(runs);
    expect(names({ text: "VALUEerror train" })).toEqual(["train_digits"]);
    expect(names({ state: "waiting" })).toEqual(["sweep[3]"]);
    expect(names({ state: "going" })).toEqual(["train_digits"]);
    expect(names({ state: "failed" })).toEqual(["train_digits", "step_3", "step_13"]);
    expect(names({ own: true })).not.toContain("sweep[3]");
    expect(names({ text: "nothing" })).toEqual([]);
    expect(names({ notebook: "eval.ipynb", state: "failed" })).toEqual([]);
    expect(names({ notebook: "eval.ipynb", text: "step" })).toHaveLength(10);
    expect(notebooksOf(runs)).toEqual(expect.arrayContaining(["eval.ipynb", "train.ipynb"]));
  });

  it("matches runs that are active, or ended within a time", () => {
    const ended = (hours: number) => run(`ended-${hours}`, { name: `${hours} h`, final: true, submitted_at: NOW - 1e6, ended_at: NOW - 3600 * hours });
    const active = run("active", { name: "active", final: false, submitted_at: NOW - 1e7, ended_at: null });
    const among = (time: TimeFilter) =>
      filterRuns([active, ended(0.5), ended(5), ended(30), ended(200)], { ...EVERY_RUN, time }, "", "", NOW, poolOf).map(({ name }) => name);
    expect(among("hour")).toEqual(["active", "0.5 h"]);
    expect(among("day")).toEqual(["active", "0.5 h", "5 h"]);
    expect(among("week")).toEqual(["active", "0.5 h", "5 h", "30 h"]);
    expect(among("any")).toHaveLength(5);
  });

  it("is parsed from storage, and ignores invalid values", () => {
    expect(parseFilter('{"text":"a","state":"failed","own":true}')).toEqual({ ...EVERY_RUN, text: "a", state: "failed", own: true });
    const whole = { text: "a", state: "ended", time: "day", own: false, notebook: "train.ipynb" } as const;
    expect(parseFilter(JSON.stringify(whole))).toEqual(whole);
    for (const text of [null, "", "{", "3", '{"state":"x"}']) expect(parseFilter(text)).toEqual(EVERY_RUN);
  });
});
