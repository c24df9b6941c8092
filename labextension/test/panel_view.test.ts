import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";

import type { KernelState, PanelHost } from "../src/panel/host";
import { NoExtension } from "../src/panel/host";
import { mountPanel } from "../src/panel/index";
import { OtherVersion } from "../src/panel/messages";
import type { PanelPlan, PanelVariables, VariableForm } from "../src/panel/messages";
import { addElement, button, press, query, selectOption, setPageHidden, typeInto } from "./dom";
import { eventually } from "./eventually";
import {
  CPUS,
  H100,
  KERNEL,
  NOW,
  PLAN,
  RUNS,
  SESSION,
  TestHost,
  TestNotebook,
  respondingWith,
  choice,
  device,
  kernelAnswer,
  kernelSnapshot,
  manyRuns,
  poolSnapshot,
  run,
  type,
} from "./panel_samples";

let controllers: AbortController[] = [];

function mounted(host: TestHost) {
  const el = addElement();
  const end = new AbortController();
  controllers.push(end);
  mountPanel(el, host, end.signal);
  return { el, end, host };
}

const text = (el: Element) => el.textContent.replaceAll("\u00a0", " ");

const all = (el: Element, selector: string) => [...el.querySelectorAll<HTMLElement>(selector)];

const waitForText = (el: Element, words: string) => eventually(() => expect(text(el)).toContain(words));

/** Chooses a value in the selection with this label. */
function choose(el: Element, label: string, value: string) {
  selectOption(query(el, `[aria-label=${label}]`), value);
}

function focused(): Element {
  if (!document.activeElement) throw new Error("nothing has the focus");
  return document.activeElement;
}

/** Waits until the form's last change has its plan. */
async function waitForPlan(el: Element) {
  await eventually(() => expect(query(el, ".sgpu-primary")).toHaveProperty("disabled", true));
  await eventually(() => expect(query(el, ".sgpu-primary")).toHaveProperty("disabled", false));
}

beforeEach(() => {
  controllers = [];
});
afterEach(() => {
  for (const end of controllers) end.abort();
  document.body.replaceChildren();
  setPageHidden(false);
  vi.useRealTimers();
});

async function ready(snapshot = kernelSnapshot(), plan: PanelPlan = PLAN, runs = RUNS, pool = poolSnapshot()) {
  const host = new TestHost(new TestNotebook(respondingWith(snapshot, plan)));
  const view = mounted(host);
  host.sendPoolState(pool, runs);
  await eventually(() => expect(view.el.querySelector(".sgpu-add, .sgpu-text, .sgpu-strong")).not.toBeNull());
  const { notebook } = host;
  if (!notebook) throw new Error("no notebook");
  return { ...view, notebook };
}

describe("the choice of devices", () => {
  it("shows availability, waiting time, memory and price of each type", async () => {
    const { el } = await ready();
    await waitForText(el, "3 of 4 free");
    expect(all(el, ".sgpu-type").map((each) => all(each, "*").map(text).filter(Boolean))).toEqual([
      ["A10", "3 of 4 free", "24 GB", "$2.50 / GPU h"],
      ["H100", "8 of 8 free", "80 GB · reserved", "$7.00 / GPU h"],
      ["B300", "0 of 2 free · about 12 min", "288 GB", "$11.00 / GPU h"],
    ]);
    expect(query(el, "[role=radiogroup]").getAttribute("aria-label")).toBe("Accelerator");
    expect(button(el, "B300, 0 of 2 free · about 12 min, 288 GB, $11.00 / GPU h").getAttribute("aria-checked")).toBe("false");
  });

  it("shows simulated devices and unknown waiting times", async () => {
    const { el } = await ready(kernelSnapshot(), PLAN, [], poolSnapshot({ types: [type({ simulated: true, free: 0, waits_s: [null] }), CPUS] }));
    await waitForText(el, "0 of 4 free");
    expect(text(query(el, ".sgpu-type"))).toContain("24 GB · simulated");
  });

  it("is changed with the arrow keys, and has a single tab stop", async () => {
    const { el, notebook } = await ready();
    await waitForText(el, "3 of 4 free");
    const types = () => all(el, ".sgpu-type");
    expect(types().map(({ tabIndex }) => tabIndex)).toEqual([0, -1, -1]);
    types()[0]?.focus();
    press(types()[0] as Element, "ArrowDown");
    await eventually(() => expect(types()[1]?.getAttribute("aria-checked")).toBe("true"));
    expect(document.activeElement).toBe(types()[1]);
    press(types()[1] as Element, "ArrowUp");
    press(types()[0] as Element, "ArrowUp");
    await eventually(() => expect(types()[2]?.getAttribute("aria-checked")).toBe("true"));
    expect(types().map(({ tabIndex }) => tabIndex)).toEqual([-1, -1, 0]);
    expect(all(el, ".sgpu-segments [role=radio]").map(text)).toEqual(["1", "2"]);
    await eventually(() => expect(notebook.questions.at(-1)).toMatchObject({ kind: "plan", choice: { type: "b300", gpus: 1 } }));
  });

  it("is planned anew when requested devices are taken or freed", async () => {
    const { el, host, notebook } = await ready(kernelSnapshot({ choice: choice({ gpus: 2, type: "a10" }) }));
    const plans = () => notebook.questions.filter(({ kind }) => kind === "plan").length;
    await waitForText(el, "3 of 4 free");
    await eventually(() => expect(plans()).toBeGreaterThan(0));
    await eventually(() => expect(el.querySelector(".sgpu-busy")).toBeNull());
    const before = plans();
    host.sendPoolState(poolSnapshot({ types: [type({ free: 1 })] }));
    await eventually(() => expect(plans()).toBe(before + 1));
    await eventually(() => expect(el.querySelector(".sgpu-busy")).toBeNull());
    host.sendPoolState(poolSnapshot({ types: [type({ free: 2 })] }));
    await eventually(() => expect(plans()).toBe(before + 2));
  });

  it("counts this notebook's devices as free, and shows when others will be free", async () => {
    const { el } = await ready(kernelSnapshot({ choice: choice({ gpus: 1 }) }));
    await waitForText(el, "3 of 4 free");
    expect(all(el, ".sgpu-later").length).toBe(0);
    const other = await ready(kernelSnapshot({ choice: choice({ gpus: 4 }) }), PLAN, [], poolSnapshot({ devices: [] }));
    await waitForText(other.el, "4 × A10 will be free in about 12 min, based on earlier runs.");
    expect(query(other.el, ".sgpu-later").getAttribute("aria-label")).toBe("4, free in about 12 min");
    expect(text(query(other.el, ".sgpu-number"))).toBe("GPUs1234");
  });

  it("shows a requested type that the pool does not have", async () => {
    const { el, notebook } = await ready(kernelSnapshot({ choice: choice({ gpus: 6 }) }));
    await waitForText(el, "The notebook asks for 6: this pool has 4 A10.");
    const six = button(el, "6: this pool has 4 A10");
    expect(six.getAttribute("aria-disabled")).toBe("true");
    six.click();
    expect(notebook.questionKinds()).not.toContain("apply");
    const missing = await ready(kernelSnapshot({ choice: choice({ type: "b200" }) }));
    await waitForText(missing.el, "The notebook asks for B200, which this pool does not have.");
  });

  it("has a number field above eight devices, limited to the pool's total", async () => {
    const { el, notebook } = await ready(kernelSnapshot(), PLAN, [], poolSnapshot({ types: [CPUS] }));
    await waitForText(el, "of 16");
    const field = query(el, "input[type=number]") as HTMLInputElement;
    expect(field.value).toBe("2");
    typeInto(field, "99");
    await eventually(() => expect(field.getAttribute("aria-invalid")).toBe("true"));
    typeInto(field, "12");
    await eventually(() => expect(notebook.questions.at(-1)).toMatchObject({ kind: "plan", choice: { type: "cpu", gpus: 12 } }));
  });

  it("hides prices if the setting is off", async () => {
    const host = new TestHost(new TestNotebook());
    host.settings = { showPrices: false };
    const { el } = mounted(host);
    host.sendPoolState(undefined, [SESSION, ...RUNS]);
    await waitForText(el, "train_digits");
    expect(text(el).replace(/This month.*/, "")).not.toContain("$");
  });

  it("selects and shows another pool", async () => {
    const { el, host, notebook } = await ready();
    host.pools.sendUpdates({
      kind: "pools", runs: [],
      pools: [
        { name: "team", about: "reserved · 4 of 8 H100 free", reserved: true, default: false, reachable: true },
        { name: "local", about: "this machine", reserved: false, default: true, reachable: true },
      ],
    });
    await eventually(() => query(el, "option[value=team]"));
    const select = query(el, "[aria-label=Pool] select");
    expect(text(select)).toBe("team · reserved · 4 of 8 H100 freelocal · this machine");
    selectOption(select, "team");
    expect(host.pools.orders).toEqual([
      { kind: "watch", pool: "" },
      { kind: "watch", pool: "team" },
    ]);
    await waitForText(el, "Waiting for the pool's first update…");
    host.pools.sendUpdates({ kind: "pool", snapshot: poolSnapshot() });
    await eventually(() => expect(notebook.questions.at(-1)).toMatchObject({ kind: "plan", choice: { pool: "team" } }));
    expect(text(el)).toContain("Waiting for the pool's first update…");
  });
});

describe("a pool", () => {
  it.each([
    ["with a notebook", true],
    ["without a notebook", false],
  ])("is replaced by the one that a run would use while it does not answer, %s", async (_words, hasNotebook) => {
    const notebook = new TestNotebook((question) =>
      question.kind === "plan" ? { kind: "plan-answer", n: 0, plan: PLAN } : kernelAnswer(kernelSnapshot({ pool: "team" })),
    );
    const host = new TestHost(hasNotebook ? notebook : null);
    const { el } = mounted(host);
    const row = { name: "local", about: "this machine", reserved: false, reachable: true };
    const team = { name: "team", about: "on demand · can't be reached", reserved: false, default: false, reachable: false };
    host.pools.sendUpdates(
      { kind: "pools", runs: [], pools: [{ ...team, about: "on demand", default: true, reachable: true }, { ...row, default: false }] },
      { kind: "pool", snapshot: poolSnapshot({ pool: "team", state: "lost" }) },
    );
    await eventually(() => expect((query(el, "[aria-label=Pool] select") as HTMLSelectElement).value).toBe("team"));
    host.pools.sendUpdates({ kind: "pools", runs: [], pools: [{ ...row, default: true }, team] });
    await eventually(() => expect(host.pools.orders.at(-1)).toEqual({ kind: "watch", pool: "local" }));
    host.pools.sendUpdates({ kind: "pool", snapshot: poolSnapshot() });
    await eventually(() => expect((query(el, "[aria-label=Pool] select") as HTMLSelectElement).value).toBe("local"));
    expect(text(query(el, "[aria-label=Pool] select"))).toContain("team · on demand · can't be reached");
  });

  it("is selected in the form even if it was chosen before the kernel answered", async () => {
    let answer: () => void = () => undefined;
    const notebook = new TestNotebook((question) =>
      question.kind === "plan"
        ? { kind: "plan-answer", n: 0, plan: PLAN }
        : new Promise((resolve) => (answer = () => resolve(kernelAnswer(kernelSnapshot())))),
    );
    const host = new TestHost(notebook);
    const { el } = mounted(host);
    host.sendPoolState();
    const pools = [
      { name: "team", about: "shared", reserved: true, default: false, reachable: true },
      { name: "local", about: "this machine", reserved: false, default: true, reachable: true },
    ];
    host.pools.sendUpdates({ kind: "pools", runs: [], pools });
    await eventually(() => query(el, "option[value=team]"));
    const select = query(el, "[aria-label=Pool] select");
    selectOption(select, "team");
    host.pools.sendUpdates({ kind: "pool", snapshot: poolSnapshot({ pool: "team" }) });
    answer();
    await eventually(() => expect(notebook.questions.at(-1)).toMatchObject({ kind: "plan", choice: { pool: "team" } }));
    expect(host.pools.orders.at(-1)).toEqual({ kind: "watch", pool: "team" });
  });
});

describe("the environment", () => {
  const peft = { sign: "+", name: "peft", words: "peft 0.17.1", removable: true } as const;

  it("shows a base and the differences from it", async () => {
    const { el } = await ready(kernelSnapshot({ differences: [peft], more_differences: 3, notes: ["numpy is older than installed."] }));
    await waitForText(el, "Python 3.12.3 · torch 2.7.1166 packages");
    expect(text(query(el, ".sgpu-package"))).toBe("+ added: peft 0.17.1remove");
    expect(text(el)).toContain("and 3 more");
    expect(text(el)).toContain("numpy is older than installed.");
  });

  it("adds a package with Enter, and rejects an invalid requirement", async () => {
    const { el, notebook } = await ready();
    const field = () => query(el, ".sgpu-add") as HTMLInputElement;
    typeInto(field(), "peft 0.17");
    await eventually(() => expect(field().value).toBe("peft 0.17"));
    press(field(), "Enter");
    await waitForText(el, "peft 0.17 is not a requirement; write name==version.");
    expect(field().getAttribute("aria-invalid")).toBe("true");
    typeInto(field(), "peft==0.17.1");
    press(field(), "Enter");
    await waitForText(el, "+ added: peft==0.17.1undo");
    expect(field().value).toBe("");
    await eventually(() =>
      expect(notebook.questions.at(-1)).toMatchObject({ kind: "plan", choice: { dependencies: ["peft==0.17.1"] } }),
    );
    button(el, "undo peft").click();
    await eventually(() => expect(el.querySelector(".sgpu-package")).toBeNull());
  });

  it("undoes a removal", async () => {
    const { el, notebook } = await ready(kernelSnapshot({ differences: [peft] }));
    button(el, "remove peft").click();
    await waitForText(el, "+ will be undone: peft 0.17.1undo");
    await eventually(() => expect(notebook.questions.at(-1)).toMatchObject({ kind: "plan", choice: { removed: ["peft"] } }));
    button(el, "undo peft").click();
    await waitForText(el, "+ added: peft 0.17.1remove");
  });

  it("changes the base", async () => {
    const { el, notebook } = await ready(kernelSnapshot({ differences: [peft] }));
    const select = query(el, "[aria-labelledby] select");
    expect(all(select, "option").map(text)).toEqual(["this notebook's packages", "4: Databricks serverless GPU, Python 3.12"]);
    selectOption(select, "4");
    await waitForText(el, "Python 3.12 · 168 packages");
    expect(el.querySelector(".sgpu-package")).toBeNull();
    await eventually(() => expect(notebook.questions.at(-1)).toMatchObject({ kind: "plan", choice: { env_version: "4" } }));
  });
});

describe("applying", () => {
  it("shows the plan, then connects", async () => {
    const { el, notebook } = await ready(kernelSnapshot({ choice: choice() }));
    await waitForText(el, "2 packages will be installed, about 20 s. Nothing is running.");
    const kept = { choice: choice(), version: 1 };
    notebook.respond = () => kernelAnswer(kernelSnapshot({ choice: choice() }), { kept, notice: "Connecting main." });
    button(el, "Apply and connect").click();
    await waitForText(el, "Connecting main.");
    expect(notebook.questions.find(({ kind }) => kind === "apply")).toEqual({
      kind: "apply",
      choice: choice(),
      connect: true,
      confirmed: false,
    });
    expect(notebook.savedChoices).toEqual([kept]);
  });

  it("shows a notice until it is closed or the form changes", async () => {
    const { el, notebook } = await ready(kernelSnapshot({ choice: choice() }));
    await waitForText(el, "2 packages will be installed");
    const plans = notebook.respond;
    notebook.respond = (question) =>
      question.kind === "apply" ? kernelAnswer(kernelSnapshot({ choice: choice() }), { notice: "cowsay installed." }) : plans(question);
    const apply = async () => {
      await eventually(() => expect(button(el, "Apply and connect").disabled).toBe(false));
      button(el, "Apply and connect").click();
      await waitForText(el, "cowsay installed.");
    };
    await apply();
    button(el, "close").click();
    await eventually(() => expect(text(el)).not.toContain("cowsay"));
    await apply();
    button(el, "3").click();
    await eventually(() => expect(text(el)).not.toContain("cowsay"));
    button(el, "Undo changes").click();
    await apply();
    // the choice in effect is no longer the one in the notice
    notebook.respond = respondingWith(kernelSnapshot({ choice: choice({ gpus: 4 }) }));
    notebook.change({ kernelState: "busy" });
    notebook.change({ kernelState: "idle" });
    await eventually(() => expect(text(el)).not.toContain("cowsay"));
  });

  it("removes the notice when the session ends", async () => {
    const { el, host, notebook } = await ready(kernelSnapshot({ choice: choice() }), PLAN, [SESSION]);
    button(el, "change").click();
    await eventually(() => button(el, "3").click());
    await waitForPlan(el);
    const plans = notebook.respond;
    notebook.respond = (question) =>
      question.kind === "apply" ? kernelAnswer(kernelSnapshot({ choice: choice({ gpus: 3 }) }), { notice: "Cells run in session main." }) : plans(question);
    button(el, "Apply and connect").click();
    await waitForText(el, "Cells run in session main.");
    notebook.respond = respondingWith(kernelSnapshot({ choice: choice({ gpus: 3 }) }));
    host.pools.sendUpdates({ kind: "runs", pool: "local", whole: false, changed: [], gone: [SESSION.run_id] });
    await eventually(() => expect(text(el)).not.toContain("Cells run in session main."));
  });

  it("requests one plan after the last change of the form", async () => {
    const { el, notebook } = await ready(kernelSnapshot({ choice: choice() }));
    await waitForText(el, "2 packages will be installed");
    const before = notebook.questionKinds().filter((kind) => kind === "plan").length;
    for (const number of ["1", "3", "4"]) button(el, number).click();
    await waitForPlan(el);
    expect(notebook.questionKinds().filter((kind) => kind === "plan").length).toBe(before + 1);
    expect(notebook.questions.at(-1)).toMatchObject({ choice: { gpus: 4 } });
    button(el, "Undo changes").click();
    await eventually(() => expect(notebook.questions.at(-1)).toMatchObject({ choice: { gpus: 2 } }));
  });

  it("sends the confirmation when state would be lost", async () => {
    const plan = { ...PLAN, loses: true, sentences: ["Session main restarts: its variables are lost."] };
    const { el, notebook } = await ready(kernelSnapshot({ choice: choice() }), plan);
    await waitForText(el, "Session main restarts");
    button(el, "Confirm").click();
    await eventually(() => expect(notebook.questions.find(({ kind }) => kind === "apply")).toMatchObject({ confirmed: true }));
  });

  it("is disabled when the plan has a problem", async () => {
    const { el } = await ready(kernelSnapshot(), { ...PLAN, problem: "This pool has no A10." });
    await waitForText(el, "This pool has no A10.");
    expect(query(el, ".sgpu-primary")).toHaveProperty("disabled", true);
    expect(text(query(el, ".sgpu-sentences [role=alert]"))).toBe("This pool has no A10.");
  });

  it("keeps the form when the kernel refuses", async () => {
    const { el, notebook } = await ready(kernelSnapshot({ choice: choice() }));
    await waitForText(el, "2 packages will be installed");
    button(el, "3").click();
    const plan = notebook.respond;
    notebook.respond = (question) => (question.kind === "apply" ? { kind: "panel-refusal", n: 0, text: "No peft 99 exists." } : plan(question));
    await waitForPlan(el);
    button(el, "Apply and connect").click();
    await waitForText(el, "No peft 99 exists.");
    expect(query(el, ".sgpu-refusal").getAttribute("role")).toBe("alert");
    expect(button(el, "3").getAttribute("aria-checked")).toBe("true");
    expect(button(el, "Apply and connect").disabled).toBe(false);
  });

  it("shows an installation, polls the kernel, and reports the outcome", async () => {
    const { el, notebook } = await ready(kernelSnapshot({ choice: choice() }));
    await waitForText(el, "2 packages will be installed");
    let answers = 0;
    notebook.respond = (question) => {
      if (question.kind === "plan") return { kind: "plan-answer", n: 0, plan: PLAN };
      if (question.kind === "kernel" && ++answers > 1) return { kind: "panel-refusal", n: 0, text: "The index does not answer." };
      return kernelAnswer(kernelSnapshot({ choice: choice() }), { installing: true });
    };
    button(el, "Apply and connect").click();
    await waitForText(el, "Installing packages…");
    expect(button(el, "Installing packages…").disabled).toBe(true);
    await eventually(() => expect(text(el)).toContain("The index does not answer."));
    await eventually(() => expect(button(el, "Apply and connect").disabled).toBe(false));
  });

  it("saves the choice without connecting", async () => {
    const { el, notebook } = await ready(kernelSnapshot({ choice: choice() }));
    await waitForText(el, "2 packages will be installed");
    button(el, "1").click();
    await waitForPlan(el);
    button(el, "Apply only").click();
    await eventually(() =>
      expect(notebook.questions.find(({ kind }) => kind === "apply")).toMatchObject({ connect: false, choice: { gpus: 1 } }),
    );
  });
});

describe("an unconfirmed choice", () => {
  const unconfirmed = () => ready(kernelSnapshot({ choice: choice({ gpus: 8, type: "h100" }), choice_words: "8 on H100", confirmed: false }));

  it("waits for confirmation, and shows its plan", async () => {
    const { el, notebook } = await unconfirmed();
    await waitForText(el, "This notebook asks for 8 on H100, which someone else chose.");
    await waitForText(el, "2 packages will be installed");
    expect(el.querySelector(".sgpu-type")).toBeNull();
    expect(notebook.questions.at(-1)).toMatchObject({ kind: "plan", connect: false, choice: { gpus: 8 } });
    notebook.respond = () => kernelAnswer(kernelSnapshot({ choice: choice({ gpus: 8, type: "h100" }) }));
    button(el, "Use it").click();
    await eventually(() => expect(query(el, ".sgpu-type[aria-checked=true] b").textContent).toBe("H100"));
    expect(notebook.questions.find(({ kind }) => kind === "apply")).toMatchObject({ connect: false, choice: { gpus: 8 } });
  });

  it("can be replaced with a choice that inherits nothing from it", async () => {
    const { el } = await unconfirmed();
    button(el, "Choose my own").click();
    await eventually(() => query(el, ".sgpu-type"));
    // the form shows the pool's default, not the unconfirmed choice
    expect(el.querySelector(".sgpu-type[aria-checked=true]")?.textContent).toContain("A10");
  });
});

describe("the session", () => {
  it("shows duration, cost and idle time, updated every second", async () => {
    vi.useFakeTimers({ toFake: ["performance", "setTimeout", "clearTimeout", "requestAnimationFrame"] });
    const host = new TestHost(new TestNotebook(respondingWith(kernelSnapshot({ choice: choice(), choice_words: "2 on A10" }))));
    const { el } = mounted(host);
    host.sendPoolState(undefined, [{ ...SESSION, idle_ends_at: NOW + 65 }]);
    await vi.advanceTimersByTimeAsync(100);
    expect(text(query(el, "[aria-label=Session]"))).toBe("Connected: 2 × A10 · local12 min · $1.00 · ends after 65 idle sEnd session");
    expect(text(query(el, "[role=status]"))).toBe("Connected: 2 × A10 · local");
    await vi.advanceTimersByTimeAsync(6_000);
    expect(text(query(el, ".sgpu-times"))).toBe("12 min · $1.01 · ends after 59 idle s");
    expect(text(query(el, ".sgpu-run-words"))).toBe("2 ranks · connected 12 min 06 s");
  });

  it("is not redrawn while the panel is hidden", async () => {
    vi.useFakeTimers({ toFake: ["performance", "setTimeout", "clearTimeout", "requestAnimationFrame"] });
    const host = new TestHost(new TestNotebook());
    const { el } = mounted(host);
    host.sendPoolState(undefined, [SESSION]);
    await vi.advanceTimersByTimeAsync(1_000);
    setPageHidden(true);
    expect(host.pools.orders.map(({ kind }) => kind)).toEqual(["watch", "rest"]);
    const before = text(el);
    await vi.advanceTimersByTimeAsync(90_000);
    expect(text(el)).toBe(before);
    expect(vi.getTimerCount()).toBe(0);
    setPageHidden(false);
    await vi.advanceTimersByTimeAsync(100);
    expect(host.pools.orders.map(({ kind }) => kind)).toEqual(["watch", "rest", "watch"]);
    expect(text(query(el, ".sgpu-run-words"))).toContain("connected 13 min 3");
  });

  it("folds the form by default", async () => {
    const { el } = await ready(kernelSnapshot({ choice: choice(), choice_words: "2 on A10, local" }), PLAN, [SESSION]);
    await waitForText(el, "2 on A10, localchange");
    expect(el.querySelector(".sgpu-type, .sgpu-primary")).toBeNull();
    button(el, "change").click();
    await eventually(() => query(el, ".sgpu-type"));
    expect(el.querySelector(".sgpu-primary")).toBeNull();
    button(el, "3").click();
    await eventually(() => query(el, ".sgpu-primary"));
  });

  it("is ended by its kernel, or by the pool if the kernel is dead", async () => {
    const sessions = [{ run_id: SESSION.run_id, name: "main", current: true, state: "running", words: "" }];
    const { el, host, notebook } = await ready(kernelSnapshot({ sessions }), PLAN, [SESSION]);
    button(el, "End session").click();
    await eventually(() => expect(notebook.questions.at(-1)).toEqual({ kind: "disconnect", name: "main" }));
    notebook.change({ kernelState: "dead" });
    await waitForText(el, "The kernel has died.");
    await eventually(() => expect(button(el, "End session").disabled).toBe(false));
    button(el, "End session").click();
    await eventually(() =>
      expect(host.pools.orders.at(-1)).toEqual({ kind: "cancel-run", run_id: SESSION.run_id, pool: "local" }),
    );
    await eventually(() => expect(button(el, "End session").disabled).toBe(true));
  });

  it("may be queued, and belongs to the active notebook", async () => {
    const waiting = { ...SESSION, state: "queued", tone: "waiting", reason: "waits for 2 A10, position 1", started_at: null, metered_at: null, idle_ends_at: null };
    const { el, host } = await ready(kernelSnapshot(), PLAN, [waiting]);
    await waitForText(el, "Waiting: 2 × A10 · localwaits for 2 A10, position 1 · 12 minEnd session");
    const other = new TestNotebook();
    other.kernel = "kernel-2";
    other.name = "eval.ipynb";
    host.setNotebook(other);
    await eventually(() => expect(text(query(el, "[aria-label=Session]"))).toBe("Not connected"));
    expect(query(el, "[role=status]").className).not.toContain("sgpu-hidden");
    host.setNotebook(null);
    await waitForText(el, "No notebook is open.");
    expect(el.querySelector("[aria-label=Session]")).toBeNull();
  });

  it("shows below its first line that devices are simulated", async () => {
    const { el } = await ready(kernelSnapshot(), PLAN, [{ ...SESSION, simulated: true }]);
    await waitForText(el, "Connected: 2 × A10 · local");
    expect(text(query(el, ".sgpu-times"))).toMatch(/^12 min · \$1\.0\d · simulated · ends after 48 idle min$/);
  });

  const ENDED = {
    ...SESSION,
    state: "cancelled",
    tone: "plain",
    final: true,
    reason: "the kernel was restarted, and a session ends with its kernel",
    ended_at: NOW - 60,
    cost: 1.2,
    idle_ends_at: null,
  };

  it("shows why it ended, and reconnects with the same devices", async () => {
    const effect = choice({ gpus: 4, dependencies: ["peft"] });
    const { el, host, notebook } = await ready(kernelSnapshot({ choice: effect }), PLAN, [ENDED]);
    await waitForText(el, "Session ended");
    expect(query(el, "[aria-label=Session]").dataset["stage"]).toBe("ended");
    expect(text(query(el, ".sgpu-times"))).toMatch(
      /^2 × A10 · (\d\d:\d\d|\d+ \w+) · the kernel was restarted, and a session ends with its kernel$/,
    );
    button(el, "Reconnect").click();
    await eventually(() =>
      expect(notebook.questions.find(({ kind }) => kind === "apply")).toEqual({
        kind: "apply",
        choice: { ...effect, gpus: 2, type: "a10" },
        connect: true,
        confirmed: false,
      }),
    );
    const next = { ...SESSION, run_id: "session-2", submitted_at: NOW };
    host.pools.sendUpdates({ kind: "runs", pool: "local", whole: false, changed: [next], gone: [] });
    await waitForText(el, "Connected: 2 × A10 · local");
    expect(text(el)).not.toContain("Session ended");
  });

  it("reconnects through a cell after a kernel restart", async () => {
    const notebook = new TestNotebook(() => Promise.reject(new NoExtension("This kernel has not loaded sgpu-magic.")));
    const host = new TestHost(notebook);
    const { el } = mounted(host);
    host.sendPoolState(undefined, [ENDED]);
    await waitForText(el, "This kernel has not loaded sgpu-magic.");
    button(el, "Reconnect").click();
    expect(host.connected.map(({ run_id }) => run_id)).toEqual([ENDED.run_id]);
    // nothing can be connected while there is no kernel
    notebook.change({ kernelState: "dead" });
    await waitForText(el, "The kernel has died.");
    expect(text(query(el, "[aria-label=Session]"))).toContain("Session ended");
    expect(text(el)).not.toContain("Reconnect");
  });

  it("names the holders of its devices, and can end this user's runs", async () => {
    const idle = { ...SESSION, run_id: "session-9", notebook: "story5.ipynb", kernel: "other" };
    const cell = run("cell-9", { session: "session-9", final: true, tone: "good", ended_at: NOW - 125 });
    const bobs = run("run-9", { name: "cell 7", user: "bob", notebook: "big.ipynb", kernel: "bobs" });
    const own = { ...SESSION, run_id: "session-8", name: "session work", submitted_at: NOW - 5000, idle_ends_at: null };
    const elsewhere = run("run-8", { device_type: "h100", kernel: "other" });
    const waiting = { ...SESSION, state: "queued", tone: "waiting", reason: "needs 1 more A10", started_at: null, metered_at: null, idle_ends_at: null };
    const { el, host } = await ready(kernelSnapshot({ pool: "team" }), PLAN, [waiting, idle, cell, bobs, own, elsewhere], poolSnapshot({ pool: "team" }));
    host.pools.sendUpdates(
      { kind: "pools", runs: [], pools: [{ name: "team", about: "", reserved: false, default: true, reachable: true }] },
      { kind: "pool", snapshot: poolSnapshot({ pool: "team" }) },
      { kind: "runs", pool: "team", whole: true, changed: [waiting, idle, cell, bobs, own, elsewhere], gone: [] },
    );
    const held = () => all(query(el, "[aria-label=Session]"), ".sgpu-holders li").map(text);
    await eventually(() =>
      expect(held()).toEqual([
        "held by story5.ipynb, idle 2 minEnd that session",
        "held by bob's big.ipynb · cell 7",
        "held by session workEnd that session",
      ]),
    );
    const row = all(el, ".sgpu-run-row").find((each) => text(each).includes("needs 1 more A10"));
    expect(text(query(row as Element, ".sgpu-run-held"))).toBe("held by story5.ipynb, idle 2 min and 2 more");
    button(el, "End that session").click();
    await waitForText(el, "End story5.ipynb · main?");
    button(el, "End").click();
    expect(host.pools.orders.at(-1)).toEqual({ kind: "cancel-run", run_id: "session-9", pool: "team" });
    await eventually(() => expect(held()[0]).toBe("held by story5.ipynb, idle 2 minEnding…"));
  });
});

describe("the variables of the session's ranks", () => {
  const form = (change: Partial<VariableForm> = {}): VariableForm => ({
    type: "Tensor",
    shape: "(10, 4)",
    dtype: "float32",
    device: "cuda:0-1",
    size: "160 B",
    ranks: "",
    ...change,
  });
  const listed = (change: Partial<PanelVariables> = {}): PanelVariables => ({
    session: "main",
    busy: false,
    variables: [
      { name: "lr", forms: [form({ type: "float", shape: "", dtype: "", device: "", size: "" })] },
      { name: "x", forms: [form({ ranks: "0" }), form({ type: "not set", shape: "", dtype: "", device: "", size: "", ranks: "1, 2" })] },
    ],
    more: 0,
    notes: [],
    ...change,
  });
  const opened = async (found: () => PanelVariables) => {
    const others = respondingWith(kernelSnapshot());
    const notebook = new TestNotebook((question) =>
      question.kind === "variables" ? { kind: "variables-answer", n: 0, variables: found() } : others(question),
    );
    const host = new TestHost(notebook);
    const { el } = mounted(host);
    host.sendPoolState(undefined, [SESSION]);
    const heading = () => [...el.querySelectorAll("h2 button")].find((each) => text(each) === "Variables");
    await eventually(() => expect(heading()).toBeDefined());
    const count = () => notebook.questionKinds().filter((kind) => kind === "variables").length;
    return { el, host, notebook, count, fold: () => heading()?.dispatchEvent(new MouseEvent("click", { bubbles: true })) };
  };
  const rows = (el: Element) =>
    [...el.querySelectorAll(".sgpu-variables tr")].map((row) => [...row.querySelectorAll("th, td")].map(text));

  it("are requested when the section is opened, with those that differ marked", async () => {
    const { el, count, fold } = await opened(listed);
    expect(count()).toBe(0);
    fold();
    await eventually(() =>
      expect(rows(el)).toEqual([
        ["name", "type", "size"],
        ["lr", "float", ""],
        ["xdiffers", "Tensor(10, 4) · float32 · cuda:0-1 · rank 0", "160 B"],
        ["not setranks 1, 2", ""],
      ]),
    );
    expect(query(el, ".sgpu-variables .sgpu-warn").title).toBe("differs between ranks");
    expect(query(el, ".sgpu-variables thead th").getAttribute("scope")).toBe("col");
    expect(query(el, ".sgpu-variables-box").tabIndex).toBe(0);
  });

  it("are requested again after a cell, but not when another one has begun or while the section is folded", async () => {
    const { notebook, count, fold } = await opened(listed);
    vi.useFakeTimers({ toFake: ["setTimeout", "clearTimeout"] });
    const runCell = () => {
      notebook.change({ kernelState: "busy" });
      notebook.change({ kernelState: "idle" });
    };
    fold();
    await vi.advanceTimersByTimeAsync(1_000);
    expect(count()).toBe(1);
    runCell();
    await vi.advanceTimersByTimeAsync(1_000);
    expect(count()).toBe(2);
    runCell();
    notebook.change({ kernelState: "busy" });
    await vi.advanceTimersByTimeAsync(1_000);
    expect(count()).toBe(2);
    notebook.change({ kernelState: "idle" });
    await vi.advanceTimersByTimeAsync(1_000);
    expect(count()).toBe(3);
    fold();
    await vi.advanceTimersByTimeAsync(1_000);
    runCell();
    await vi.advanceTimersByTimeAsync(1_000);
    expect(count()).toBe(3);
  });

  it("stay listed while a cell runs, and say how many more there are", async () => {
    let found = listed({ more: 1200 });
    const { el, notebook, fold } = await opened(() => found);
    fold();
    await eventually(() => expect(text(el)).toContain("and 1,200 more"));
    found = listed({ busy: true, variables: [] });
    notebook.change();
    await eventually(() => expect(text(el)).toContain("A cell runs in the session"));
    expect(rows(el)).toHaveLength(4);
  });

  it("are gone with the session", async () => {
    const { el, host, fold } = await opened(listed);
    fold();
    await eventually(() => expect(rows(el)).toHaveLength(4));
    const ended = { ...SESSION, final: true, state: "cancelled", ended_at: NOW };
    host.pools.sendUpdates({ kind: "runs", pool: "local", whole: false, changed: [ended], gone: [] });
    await eventually(() => expect(el.querySelector(".sgpu-variables")).toBeNull());
  });
});

describe("a state without a form", () => {
  const states: [KernelState, string, string][] = [
    ["none", "This notebook has no kernel.", "Start a kernel"],
    ["dead", "The kernel has died.", "Start a kernel"],
    ["disconnected", "The link to the kernel is down.", "Check again"],
    ["starting", "The kernel is starting.", ""],
    ["restarting", "The kernel is restarting.", ""],
  ];
  it.each(states)("is shown for a kernel that is %s", async (kernelState, words, name) => {
    const notebook = new TestNotebook();
    notebook.kernelState = kernelState;
    const host = new TestHost(notebook);
    const { el } = mounted(host);
    host.sendPoolState();
    await waitForText(el, words);
    await waitForText(el, "train_digits");
    expect(notebook.questions).toEqual([]);
    if (name) button(el, name).click();
    if (name === "Start a kernel") expect(notebook.startCount).toBe(1);
    notebook.change({ kernelState: "idle" });
    await eventually(() => query(el, ".sgpu-add"));
  });

  it("is shown without a notebook", async () => {
    const host = new TestHost(null);
    host.newNotebook = vi.fn();
    const { el } = mounted(host);
    host.sendPoolState();
    await waitForText(el, "No notebook is open.");
    button(el, "New notebook").click();
    expect(host.newNotebook).toHaveBeenCalledOnce();
    await eventually(() => expect(all(el, ".sgpu-run-row").length).toBe(RUNS.length));
  });

  it("is shown for a kernel without the extension until a cell loads it", async () => {
    const notebook = new TestNotebook(() => Promise.reject(new NoExtension("This kernel has not loaded sgpu-magic.")));
    const host = new TestHost(notebook);
    const { el } = mounted(host);
    host.sendPoolState();
    await waitForText(el, "This kernel has not loaded sgpu-magic.");
    button(el, "Run %load_ext sgpu_magic").click();
    expect(notebook.loadCount).toBe(1);
    expect(text(el)).toContain("You can still watch the pool.");
    notebook.respond = respondingWith(kernelSnapshot());
    notebook.change({ kernelState: "busy" });
    notebook.change({ kernelState: "idle" });
    await eventually(() => query(el, ".sgpu-add"));
  });

  it("is shown for a kernel that is busy, does not answer, or has another version", async () => {
    let fail: (error: Error) => void = () => undefined;
    const notebook = new TestNotebook(() => new Promise((_, reject) => (fail = reject)));
    notebook.kernelState = "busy";
    const host = new TestHost(notebook);
    const { el } = mounted(host);
    host.sendPoolState();
    await waitForText(el, "The kernel is busy and has not answered yet.");
    fail(new Error("The kernel has not answered."));
    await waitForText(el, "The kernel has not answered.");
    notebook.respond = () => Promise.reject(new OtherVersion("This page has another version."));
    button(el, "Ask again").click();
    await waitForText(el, "This page has another version.");
    notebook.respond = respondingWith(kernelSnapshot());
    await eventually(() => button(el, "Ask again").click());
    await eventually(() => query(el, ".sgpu-add"));
  });

  it("keeps the user's draft, but not the previous kernel's state", async () => {
    const { el, notebook } = await ready(kernelSnapshot({ choice: choice() }));
    await waitForText(el, "3 of 4 free");
    button(el, "3").click();
    notebook.change({ kernelState: "restarting" });
    await waitForText(el, "The kernel is restarting.");
    notebook.change({ kernelState: "starting" });
    notebook.change({ kernelState: "idle" });
    await eventually(() => expect(button(el, "3").getAttribute("aria-checked")).toBe("true"));
  });
});

describe("the connection to the pool", () => {
  it.each([
    ["absent", "This Jupyter server has no sgpu-magic."],
    ["refused", "The Jupyter server denies this page access to pools."],
    ["away", "The Jupyter server does not answer."],
  ] as const)("may be %s", async (kind, words) => {
    const host = new TestHost();
    const { el } = mounted(host);
    await waitForText(el, "Looking for the pool…");
    host.pools.setLink({ kind, text: "" });
    await waitForText(el, words);
    button(el, "Try again").click();
    expect(host.pools.retryCount).toBe(1);
    host.pools.setLink({ kind, text: "Something else." });
    await waitForText(el, "Something else.");
  });

  it.each(["none", "lost", "other-version", "problem"] as const)("shows a pool that is %s", async (state) => {
    const remedy = state === "problem" ? ("retry" as const) : ("start" as const);
    const host = new TestHost();
    const { el } = mounted(host);
    host.sendPoolState(poolSnapshot({ state, sentence: "Nobody is there.", remedy, remedy_words: "Do it", types: [], devices: [] }), RUNS);
    await waitForText(el, "Nobody is there.");
    button(el, "Do it").click();
    expect(host.pools.orders.at(-1)).toEqual(remedy === "start" ? { kind: "start-pool", pool: "local" } : { kind: "watch", pool: "" });
    expect(all(el, ".sgpu-run-row").length).toBe(RUNS.length);
    if (remedy === "retry") return;
    await waitForText(el, "Starting…");
    host.pools.sendUpdates({ kind: "command-result", text: "There is no room for a pool.", ok: false });
    await eventually(() => expect(text(query(el, "[role=alert]:not(.sgpu-problem)"))).toBe("There is no room for a pool."));
    expect(button(el, "Do it").disabled).toBe(false);
    button(el, "close").click();
    await eventually(() => expect(text(el)).not.toContain("no room"));
  });
});

describe("devices", () => {
  it("have a row for each type, with free, own and other devices", async () => {
    const { el } = await ready();
    await waitForText(el, "8 of 8 free");
    expect(all(el, ".sgpu-device-type").map(text)).toEqual([
      "A10: 3 of 4 free, 2 this notebook's",
      "H100: 8 of 8 free",
      "B300: 0 of 2 free, 2 others'",
    ]);
    const squares = (row: Element) => all(row, ".sgpu-square").map(({ className }) => className.replace("sgpu-square sgpu-square-", ""));
    const [, h100, b300] = all(el, ".sgpu-device-type");
    expect(squares(h100 as Element)).toEqual(Array(8).fill("free"));
    expect(squares(b300 as Element)).toEqual(["others", "others"]);
  });

  it("are drawn as a bar if a type has many", async () => {
    const { el } = await ready(kernelSnapshot(), PLAN, [], poolSnapshot({ types: [type({ total: 10_000, free: 9_992 })], devices: [device(0, { user: "7 of 8 free" })] }));
    await waitForText(el, "9992 of 10000 free");
    expect(el.querySelector(".sgpu-square")).toBeNull();
    expect(all(el, ".sgpu-strip-bar > i").map(({ className, style }) => [className, style.flexGrow])).toEqual([
      ["sgpu-square-own", "0"],
      ["sgpu-square-others", "8"],
      ["sgpu-square-free", "9992"],
    ]);
  });

  it("expand to each device's load, memory and user", async () => {
    const { el, host } = await ready();
    await waitForText(el, "A10 · 0");
    expect(all(el, ".sgpu-device > .sgpu-hidden").map(text)).toEqual([
      "94 %, 18.2 GB, train.ipynb · rank 0, this notebook's",
      "91 %, 18.1 GB, train.ipynb · rank 1, this notebook's",
      "34 %, 6.4 GB, eval.ipynb",
      "0 %, 0.0 GB, free",
    ]);
    expect(all(el, ".sgpu-own").length).toBe(2);
    expect(query(el, ".sgpu-device .sgpu-track i").style.width).toBe("94%");
    query(el, ".sgpu-device-type").click();
    await eventually(() => expect(el.querySelector(".sgpu-device")).toBeNull());
    const again = mounted(host);
    host.sendPoolState();
    await waitForText(again.el, "3 of 4 free");
    expect(again.el.querySelector(".sgpu-device")).toBeNull();
    query(again.el, ".sgpu-device-type").click();
    await eventually(() => expect(all(again.el, ".sgpu-device").length).toBe(4));
  });

  it("have a curve of their last ten minutes", async () => {
    const history = { utilization_pct: [60, null, 100, 80], memory_pct: [50, 50, 50, null], runs: ["7f3a train.ipynb", "9b20"] };
    const own = { kernel: KERNEL, run_id: "s1", user: "train.ipynb", free: false };
    const devices = [
      device(0, { ...own, used_bytes: 12e9, history }),
      device(1, { ...own, used_bytes: null, history: { ...history, runs: [] } }),
      device(2, own),
    ];
    const { el } = await ready(kernelSnapshot(), PLAN, [], poolSnapshot({ types: [type({ total: 3, free: 0 })], devices }));
    await waitForText(el, "A10 · 0");
    const words = [
      "10 minutes: use 80 % on average, memory 12.0 GB of 24 GB now; held by 7f3a train.ipynb, 9b20",
      "10 minutes: use 80 % on average, memory 50 % now",
    ];
    const curves = all(el, ".sgpu-history");
    expect(curves.map(({ title }) => title)).toEqual(words);
    expect(curves.map((curve) => text(query(curve, ".sgpu-hidden")))).toEqual(words);
    const lines = (curve: Element | undefined, name: string) =>
      Array.from(curve?.querySelectorAll(`.sgpu-history-${name}`) ?? [], (line) => line.getAttribute("points"));
    // a gap interrupts the line, and the last value is at the right edge
    expect(lines(curves[0], "use")).toEqual(["55.5,7.4 56.5,7.4", "58,1 59,4.2"]);
    expect(lines(curves[0], "memory")).toEqual(["56,9 57,9 58,9"]);
  });

  it("have the mean's curve in a pool of very many", async () => {
    const history = { utilization_pct: [60, 80], memory_pct: [50, 55], runs: [] };
    const devices = [device(0, { kernel: KERNEL, run_id: "s1", user: "train.ipynb", free: false })];
    const { el } = await ready(kernelSnapshot(), PLAN, [], poolSnapshot({ types: [type({ total: 128, free: 127, history })], devices }));
    await waitForText(el, "127 of 128 free");
    query(el, ".sgpu-device-type").click();
    await eventually(() => expect(all(el, ".sgpu-history").map(({ title }) => title)).toEqual(["10 minutes: use 70 % on average, memory 55 % now"]));
    expect(text(query(el, ".sgpu-mean > b"))).toBe("mean");
  });

  it("show what the values of simulated devices measure", async () => {
    const simulated = { simulated: true, utilization_pct: 50, used_bytes: 4e8 };
    const devices = [device(0, { ...simulated, kernel: KERNEL, run_id: "s1", user: "train.ipynb", free: false })];
    const { el } = await ready(kernelSnapshot(), PLAN, [], poolSnapshot({ types: [type({ simulated: true, total: 1, free: 0 })], devices }));
    await waitForText(el, "Simulated devices show the CPU and memory of their ranks.");
    expect(text(query(el, ".sgpu-device > .sgpu-hidden"))).toBe("50 %, 0.4 GB, train.ipynb, this notebook's, simulated");
  });

  it("are CPU slots in a pool without GPUs", async () => {
    const { el } = await ready(kernelSnapshot(), PLAN, [], poolSnapshot({ types: [CPUS], devices: [], cpu_slots: 16, cpu_slots_free: 12, notes: ["No GPU here."] }));
    await waitForText(el, "12 of 16 ranks free");
    expect(text(query(el, ".sgpu-device-types + p"))).toBe("No GPU here.");
  });

  it("stay folded after a reload", async () => {
    const { el, host } = await ready();
    button(el, "Devices").click();
    await eventually(() => expect(el.querySelector(".sgpu-device")).toBeNull());
    const again = mounted(host);
    host.sendPoolState();
    await waitForText(again.el, "Devices");
    expect(again.el.querySelector(".sgpu-device")).toBeNull();
    expect(button(again.el, "Devices").getAttribute("aria-expanded")).toBe("false");
  });
});

describe("runs", () => {
  it("are listed newest first, each with a shape and a text for its state", async () => {
    const { el } = await ready();
    await waitForText(el, "sweep[3]");
    expect(all(el, ".sgpu-run-name").map((each) => text(each).replace(/ \(.*/, ""))).toEqual([
      "train.ipynb · train_digits",
      "sweep.ipynb · sweep[3]",
      "train.ipynb · train_digits",
      "train.ipynb · preprocess",
    ]);
    expect(all(el, ".sgpu-dot .sgpu-hidden").map(text)).toEqual(["running", "queued", "failed", "succeeded"]);
    expect(new Set(all(el, ".sgpu-dot svg").map(({ innerHTML }) => innerHTML)).size).toBe(4);
    expect(all(el, ".sgpu-run-cost").map(text)).toEqual(["$0.19", "", "$0.02", "$0.30"]);
  });

  it("are updated with differences", async () => {
    const { el, host } = await ready();
    await waitForText(el, "sweep[3]");
    const done = { ...run("run-4"), state: "succeeded", tone: "good", final: true, ended_at: NOW, cost: 0.2 };
    const next = run("run-5", { name: "next", submitted_at: NOW });
    host.pools.sendUpdates({ kind: "runs", pool: "local", whole: false, changed: [done, next], gone: ["run-1"] });
    await eventually(() => expect(all(el, ".sgpu-dot .sgpu-hidden").map(text)).toEqual(["running", "succeeded", "queued", "failed"]));
    host.pools.sendUpdates({ kind: "runs", pool: "elsewhere", whole: true, changed: [], gone: [] });
    host.pools.sendUpdates({ kind: "runs", pool: "local", whole: true, changed: [next], gone: [] });
    await eventually(() => expect(all(el, ".sgpu-run-row").length).toBe(1));
  });

  it("open their view and actions, and end after a confirmation", async () => {
    const { el, host } = await ready();
    await waitForText(el, "sweep[3]");
    const [head] = all(el, ".sgpu-run-head");
    head?.click();
    expect(host.opened.map(({ run_id }) => run_id)).toEqual(["run-4"]);
    expect(el.querySelector(".sgpu-actions")).toBeNull();
    const more = button(el, "Actions of train.ipynb · train_digits");
    more.click();
    await eventually(() => expect(more.getAttribute("aria-expanded")).toBe("true"));
    button(el, "Attach").click();
    expect(host.attached.map(({ run_id }) => run_id)).toEqual(["run-4"]);
    // the run has not ended yet
    expect(text(query(el, ".sgpu-actions"))).not.toContain("Rerun");
    button(el, "End run").click();
    await waitForText(el, "End train.ipynb · train_digits?");
    await eventually(() => expect(document.activeElement).toBe(button(el, "End")));
    button(el, "Don't end").click();
    await eventually(() => expect(document.activeElement).toBe(head));
    expect(host.pools.orders.length).toBe(1);
    button(el, "End run").click();
    await eventually(() => button(el, "End").click());
    expect(host.pools.orders.at(-1)).toEqual({ kind: "cancel-run", run_id: "run-4", pool: "local" });
    await eventually(() => expect(button(el, "Ending…").disabled).toBe(true));
    host.pools.sendUpdates({ kind: "runs", pool: "local", whole: false, changed: [{ ...run("run-4"), state: "cancelled", tone: "plain", final: true }], gone: [] });
    await eventually(() => expect(text(el)).not.toContain("Ending…"));
    button(el, "Rerun").click();
    expect(host.replayed.map(({ run_id }) => run_id)).toEqual(["run-4"]);
  });

  it("show and hide their actions with the arrow keys", async () => {
    const { el } = await ready();
    await waitForText(el, "sweep[3]");
    const [head] = all(el, ".sgpu-run-head");
    head?.focus();
    press(focused(), "ArrowRight");
    await eventually(() => query(el, ".sgpu-open-row .sgpu-actions"));
    expect(document.activeElement).toBe(head);
    press(focused(), "ArrowLeft");
    await eventually(() => expect(el.querySelector(".sgpu-actions")).toBeNull());
  });

  it("are compared side by side", async () => {
    const scrolled = vi.fn();
    Element.prototype.scrollIntoView = scrolled;
    const { el } = await ready();
    await waitForText(el, "sweep[3]");
    const compare = async (at: number) => {
      all(el, ".sgpu-menu")[at]?.click();
      await eventually(() => expect(all(el, ".sgpu-menu")[at]?.getAttribute("aria-expanded")).toBe("true"));
      button(el, "Compare").click();
    };
    await compare(2);
    await waitForText(el, "Compare train.ipynb · train_digits with: choose Compare at another run.");
    await compare(3);
    await eventually(() => query(el, ".sgpu-comparison"));
    expect(scrolled).toHaveBeenCalledOnce();
    const cells = (row: Element) => all(row, "th, td").map(text);
    expect(all(el, ".sgpu-comparison tr").map(cells)).toEqual([
      ["×", "train.ipynb · train_digits", "train.ipynb · preprocess"],
      ["run", "run-", "run-"],
      ["state", "failed", "succeeded"],
      ["devices", "2 × A10", "2 × A10"],
      ["started", expect.stringMatching(/^(\d\d:\d\d|\d+ \w+)$/), expect.stringMatching(/^(\d\d:\d\d|\d+ \w+)$/)],
      ["duration", "20 s", "3 min 36 s"],
      ["cost", "$0.02", "$0.30"],
      ["user", "ada", "ada"],
      ["lr", "0.1", "0.01"],
      ["batch", "64", "–"],
      ["epochs", "–", "3"],
    ]);
    expect(all(el, ".sgpu-unequal th").map(text)).toEqual(expect.arrayContaining(["state", "duration", "cost", "lr"]));
    button(el, "Close the comparison").click();
    await eventually(() => expect(el.querySelector(".sgpu-comparing")).toBeNull());
  });

  it("are compared in a separate tab if the host has tabs", async () => {
    const { el, host } = await ready();
    const compareRuns = vi.fn<NonNullable<PanelHost["compareRuns"]>>();
    host.compareRuns = compareRuns;
    await waitForText(el, "sweep[3]");
    for (const at of [2, 3]) {
      all(el, ".sgpu-menu")[at]?.click();
      await eventually(() => expect(all(el, ".sgpu-menu")[at]?.getAttribute("aria-expanded")).toBe("true"));
      button(el, "Compare").click();
    }
    await eventually(() => expect(compareRuns).toHaveBeenCalledOnce());
    expect(compareRuns.mock.calls[0]?.map(({ name }) => name)).toEqual(["train_digits", "preprocess"]);
    await eventually(() => expect(el.querySelector(".sgpu-comparing")).toBeNull());
  });

  describe("of several pools", () => {
    const choiceOf = (name: string, reachable = true) => ({ name, about: "", reserved: false, default: name === "local", reachable });
    const listed = (...pools: readonly ReturnType<typeof choiceOf>[]) => ({
      kind: "pools" as const,
      pools,
      runs: [
        { pool: "local", runs: [run("stale-1", { name: "as polled ten seconds ago" })] },
        { pool: "team", runs: [run("team-1", { name: "tune", kernel: "other", submitted_at: NOW - 150, user: "eve" })] },
      ],
    });
    const names = (el: Element) => all(el, ".sgpu-run-row").map((row) => text(query(row, ".sgpu-clip")));
    const words = (el: Element) => all(el, ".sgpu-run-words").map((each) => text(each).split(" · ")[0]);

    it("are one list, each with its pool, and those of the pool that is shown as it reports them", async () => {
      const { el, host } = await ready(kernelSnapshot(), PLAN, [run("run-4")]);
      expect(words(el)).toEqual(["2 ranks"]);
      host.pools.sendUpdates(listed(choiceOf("local"), choiceOf("team")));
      await eventually(() => expect(names(el)).toEqual([" · train_digits", " · tune"]));
      expect(words(el)).toEqual(["local", "team"]);
      expect(el.textContent).not.toContain("can't be reached");
    });

    it("are ended in their own pool", async () => {
      const { el, host } = await ready(kernelSnapshot(), PLAN, [run("run-4")]);
      host.pools.sendUpdates(listed(choiceOf("local"), choiceOf("team")));
      await eventually(() => expect(names(el)).toHaveLength(2));
      button(el, "Actions of train.ipynb · tune").click();
      await eventually(() => button(el, "End run").click());
      await eventually(() => button(el, "End").click());
      expect(host.pools.orders.at(-1)).toEqual({ kind: "cancel-run", run_id: "team-1", pool: "team" });
    });

    it("have a mark where a pool is away, and are listed all the same", async () => {
      const { el, host } = await ready(kernelSnapshot(), PLAN, [run("run-4")]);
      host.pools.sendUpdates(listed(choiceOf("local"), choiceOf("team", false)));
      await waitForText(el, "team can't be reached now: the list has none of its newer runs.");
      expect(names(el)).toHaveLength(2);
    });
  });

  it("link to MLflow if the URL is a web page, and show that files are remote", async () => {
    const { el, host } = await ready(kernelSnapshot(), PLAN, [run("a", { tracked_url: "https://mlflow.example/1", here: false })]);
    await waitForText(el, "train_digits");
    query(el, ".sgpu-run-head").click();
    await waitForText(el, "Open in MLflow");
    expect(query(el, ".sgpu-actions a").getAttribute("href")).toBe("https://mlflow.example/1");
    expect(text(query(el, ".sgpu-actions"))).toContain("its files are on another machine");
    expect(host.opened).toEqual([]);
    const other = await ready(kernelSnapshot(), PLAN, [run("b", { tracked_url: "javascript:alert(1)" })]);
    await waitForText(other.el, "train_digits");
    query(other.el, ".sgpu-menu").click();
    await waitForText(other.el, "End run");
    expect(other.el.querySelector("a")).toBeNull();
  });

  it("draw only the rows in view out of 1,000, and move the focus with the keyboard", async () => {
    const { el, host } = await ready(kernelSnapshot(), PLAN, manyRuns(1000));
    await eventually(() => expect(all(el, ".sgpu-run-row").length).toBeGreaterThan(5));
    expect(all(el, ".sgpu-run-row").length).toBeLessThan(60);
    expect(query(el, ".sgpu-run-row").getAttribute("aria-setsize")).toBe("1000");
    const began = performance.now();
    for (let index = 0; index < 20; index++) {
      const changed = [0, 1, 2, 3, 4].map((at) => ({ ...(manyRuns(5)[at] ?? run("x")), reason: `round ${index}` }));
      host.pools.sendUpdates({ kind: "runs", pool: "local", whole: false, changed, gone: [] });
      await eventually(() => expect(text(query(el, ".sgpu-run-words"))).toContain(`round ${index}`));
    }
    expect(performance.now() - began).toBeLessThan(10_000);
    const tabs = () => all(el, ".sgpu-run-head").filter(({ tabIndex }) => tabIndex === 0);
    expect(tabs().length).toBe(1);
    tabs()[0]?.focus();
    press(focused(), "ArrowDown");
    await eventually(() => expect(document.activeElement?.getAttribute("data-run")).toBe("many-0001"));
    press(focused(), "End");
    await eventually(() => expect(document.activeElement?.getAttribute("data-run")).toBe("many-0999"));
    expect(tabs().length).toBe(1);
    expect(all(el, ".sgpu-run-row").length).toBeLessThan(60);
  });

  it("scroll an opened row's actions into view", async () => {
    const { el } = await ready(kernelSnapshot(), PLAN, manyRuns(10));
    await eventually(() => expect(all(el, ".sgpu-run-row").length).toBe(10));
    const scroller = query(el, ".sgpu-panel");
    scroller.scrollTop = 0;
    all(el, ".sgpu-menu")[0]?.click();
    await eventually(() => query(el, ".sgpu-actions"));
    expect(scroller.scrollTop).toBe(0);
    all(el, ".sgpu-menu")[9]?.click();
    await eventually(() => expect(scroller.scrollTop).toBe(60));
  });

  it("are searched and filtered, and keep the filter after a reload", async () => {
    const { el, host } = await ready(kernelSnapshot(), PLAN, [...RUNS, ...manyRuns(100)]);
    await eventually(() => query(el, "[type=search]"));
    typeInto(query(el, "[type=search]"), "step_9");
    await eventually(() => expect(query(el, ".sgpu-run-row").getAttribute("aria-setsize")).toBe("11"));
    choose(el, "Notebook", "/");
    await eventually(() => expect(query(el, ".sgpu-run-row").getAttribute("aria-setsize")).toBe("6"));
    choose(el, "State", "failed");
    await eventually(() => expect(query(el, ".sgpu-run-row").getAttribute("aria-setsize")).toBe("1"));
    const again = mounted(host);
    host.sendPoolState(undefined, [...RUNS, ...manyRuns(100)]);
    await eventually(() => expect(all(again.el, ".sgpu-run-row").length).toBe(1));
    typeInto(query(again.el, "[type=search]"), "nothing at all");
    await waitForText(again.el, "No matching runs.");
    button(again.el, "Show all").click();
    await eventually(() => expect(query(again.el, ".sgpu-run-row").getAttribute("aria-setsize")).toBe("104"));
  });

  it("show a hint while there are none", async () => {
    const { el } = await ready(kernelSnapshot(), PLAN, []);
    await waitForText(el, "No runs yet.");
    expect(text(el)).toContain("This month 41.2 GPU h · $118 of $300");
  });
});

describe("the kernel", () => {
  it("is queried when a cell ends or its session changes, not when a cell starts", async () => {
    const { host, notebook } = await ready(kernelSnapshot(), PLAN, []);
    const count = () => notebook.questionKinds().filter((kind) => kind === "kernel").length;
    await eventually(() => expect(notebook.questionKinds()).toContain("plan"));
    const before = count();
    notebook.change({ kernelState: "busy" });
    notebook.change({ kernelState: "idle" });
    await eventually(() => expect(count()).toBe(before + 1));
    host.pools.sendUpdates({ kind: "runs", pool: "local", whole: false, changed: [SESSION], gone: [] });
    await eventually(() => expect(count()).toBe(before + 2));
    const other = { ...SESSION, run_id: "other", kernel: "another" };
    host.pools.sendUpdates({ kind: "runs", pool: "local", whole: false, changed: [other], gone: [] });
    for (let index = 0; index < 10; index++) notebook.change();
    await eventually(() => expect(count()).toBeGreaterThan(before + 2));
    expect(count()).toBeLessThan(before + 5);
  });

  it("receives the notebook's saved choice", async () => {
    const kept = { choice: choice(), version: 1 };
    const notebook = new TestNotebook();
    notebook.savedChoice = kept;
    mounted(new TestHost(notebook));
    await eventually(() => expect(notebook.questions[0]).toEqual({ kind: "kernel", kept }));
    expect(notebook.kernel).toBe(KERNEL);
  });
});

describe("closing the panel", () => {
  it("leaves no element, listener or subscription", async () => {
    const { el, end, host, notebook } = await ready(kernelSnapshot(), PLAN, [SESSION], poolSnapshot({ types: [type(), H100] }));
    await waitForText(el, "Connected");
    end.abort();
    expect(el.childNodes.length).toBe(0);
    expect(notebook.listenerCount).toBe(0);
    expect(host.listenerCount).toBe(0);
    expect(host.pools.orders.at(-1)).toEqual({ kind: "rest" });
  });
});
