import { afterEach, describe, expect, it, vi } from "vitest";

import { diffLines } from "../src/run_page/line_diff";
import { mountComparison, mountRunPage } from "../src/run_page";
import { RunPageModel } from "../src/run_page/page_model";
import type { PageServer } from "../src/run_page/page_model";
import { pageFiles, runPage } from "../src/run_page/records";
import type { MlflowAddress, PageFiles, PageMlflow, RunPage } from "../src/run_page/records";
import { addElement } from "./dom";
import { eventually } from "./eventually";

const PAGE: RunPage = runPage(
  {
    run_id: "7f3a90c1",
    name: "Fit",
    kind: "cell",
    state: "running",
    magic_line: "%%distributed -n 2",
    code: [
      { title: "cell 3", text: "loss = fit(lr)\nprint(loss)" },
      { title: "cell 2", text: "def fit(lr): ..." },
    ],
    options: [{ name: "--gpus", value: "2" }],
    parameters: [{ name: "lr", value: "0.1" }],
    metrics: [{ name: "loss", value: "0.5" }],
    devices: ["2 × A10, nccl", "local"],
    submitted_at: 1_000,
    started_at: 1_010,
    phases: [
      { name: "queued", seconds: 4, current: false },
      { name: "running", seconds: 90, current: true },
    ],
    shipped: [
      { name: "lr", size: 5 },
      { name: "fit", size: null },
      { name: "weights", size: 2_000_000 },
    ],
    shipped_bytes: 2_000_400,
    cost: "$0.37",
    mlflow: null,
    environment: { run: "7f39", changes: [{ name: "torch", before: "2.7.1", after: "2.8.0" }, { name: "peft", before: "", after: "0.17" }] },
  },
  "page",
  true,
);
const FILES: PageFiles = pageFiles(
  { files: [{ name: "checkpoints/a b.pt", size: 312, changed_at: 1_020 }], more: false, cwd: "/home/ada" },
  "files",
  true,
);

class FakeServer implements PageServer {
  pages: Record<string, RunPage> = { [PAGE.run_id]: PAGE };
  refusal = "";
  requests = 0;

  page(run: string): Promise<RunPage> {
    this.requests += 1;
    const page = this.pages[run];
    return this.refusal === "" && page ? Promise.resolve(page) : Promise.reject(new Error(this.refusal));
  }

  files(): Promise<PageFiles> {
    return Promise.resolve(FILES);
  }

  /** The replies to the requests for `mlflow ui`, in order. */
  addresses: (MlflowAddress | Error)[] = [];
  mlflowAddress(): Promise<MlflowAddress> {
    const next = this.addresses.shift() ?? new Error("not asked for");
    return next instanceof Error ? Promise.reject(next) : Promise.resolve(next);
  }

  fileUrl(run: string, name: string): string {
    return `/lab/${run}/${encodeURIComponent(name)}`;
  }
}

let controller = new AbortController();

afterEach(() => {
  controller.abort();
  controller = new AbortController();
  document.body.replaceChildren();
});

function rows(el: Element, label: string): (string | null)[][] {
  const section = el.querySelector(`[aria-label="${label}"]`);
  return [...(section?.querySelectorAll("tr") ?? [])].map((row) => [...row.querySelectorAll("th, td")].map(({ textContent }) => textContent));
}

describe("a run's page", () => {
  const mounted = (server: FakeServer) => {
    const el = addElement();
    const model = new RunPageModel(PAGE.run_id, server, controller.signal);
    mountRunPage(el, model, controller.signal);
    return { el, model };
  };

  it("shows code, options, phases, shipped names, environment and files", async () => {
    const { el, model } = mounted(new FakeServer());
    await model.refresh();
    await eventually(() => expect(rows(el, "options")).toEqual([["--gpus", "2"]]));
    expect(el.querySelector("figure pre")?.textContent).toBe("%%distributed -n 2\nloss = fit(lr)\nprint(loss)");
    expect(el.querySelector("details")?.textContent).toContain("def fit(lr)");
    expect(rows(el, "phases").map((row) => row.slice(0, 2))).toEqual([["queued", "4 s"], ["running", "90 s"]]);
    expect(rows(el, "shipped")).toEqual([["weights", "2.0 MB"], ["lr", "5 B"], ["fit", ""]]);
    expect(rows(el, "environment").slice(1)).toEqual([["torch", "2.7.1", "2.8.0"], ["peft", "–", "0.17"]]);
    const link = el.querySelector("a");
    expect([link?.getAttribute("href"), link?.download]).toEqual(["/lab/7f3a90c1/checkpoints%2Fa%20b.pt", "a b.pt"]);
    expect(el.textContent).toContain("working directory was /home/ada");
  });

  it.each([
    ["session", "Each cell of the session is a run of its own"],
    ["call", "source was not sent"],
  ])("says why a %s has no code", async (kind, text) => {
    const server = new FakeServer();
    server.pages[PAGE.run_id] = { ...PAGE, kind, code: [] };
    const { el, model } = mounted(server);
    await model.refresh();
    await eventually(() => expect(el.querySelector('[aria-label="code"]')?.textContent).toContain(text));
  });

  it("is requested again when the state changes, and keeps its content when the server refuses", async () => {
    const server = new FakeServer();
    const { el, model } = mounted(server);
    model.onSnapshot({ state: "running" });
    await eventually(() => expect(rows(el, "options")).toHaveLength(1));
    const before = server.requests;
    model.onSnapshot({ state: "running" });
    expect(server.requests).toBe(before);
    server.refusal = "the run is gone";
    model.onSnapshot({ state: "succeeded" });
    await eventually(() => expect(el.textContent).toContain("can't be updated: the run is gone"));
    expect(rows(el, "options")).toHaveLength(1);
  });
});

describe("a comparison", () => {
  it("marks different values and shows a diff of the code", async () => {
    const server = new FakeServer();
    const metrics = [{ name: "loss", value: "0.25" }, { name: "accuracy", value: "0.9" }];
    const code = [{ title: "cell 3", text: "loss = fit(2 * lr)\nprint(loss)" }];
    server.pages["8000aaaa"] = { ...PAGE, run_id: "8000aaaa", name: "Fit again", metrics, code };
    const el = addElement();
    mountComparison(el, [PAGE.run_id, "8000aaaa"], server, controller.signal);
    await eventually(() => expect(rows(el, "last metrics").slice(1)).toEqual([["loss", "0.5", "0.25"], ["accuracy", "–", "0.9"]]));
    const differing = [...el.querySelectorAll(".sgpu-differs th")].map(({ textContent }) => textContent);
    expect(differing).toEqual(["loss", "accuracy"]);
    const lines = [...el.querySelectorAll("pre > div")].map(({ textContent }) => textContent);
    expect(lines).toEqual(["  %%distributed -n 2", "− loss = fit(lr)", "+ loss = fit(2 * lr)", "  print(loss)", "− def fit(lr): ..."]);
  });

  it("says why a run can't be compared", async () => {
    const server = new FakeServer();
    server.refusal = "no directory for run 8000";
    const el = addElement();
    mountComparison(el, [PAGE.run_id, "8000aaaa"], server, controller.signal);
    await eventually(() => expect(el.textContent).toContain("The runs can't be compared: no directory for run 8000"));
  });
});

describe("a line diff", () => {
  const diff = (before: string, after: string) => diffLines(before, after).map(({ sign, text }) => sign + text);

  it("keeps the lines in order, with as few changes as possible", () => {
    expect(diff("a\nb\nc\nd", "a\nc\nx\nd")).toEqual([" a", "-b", " c", "+x", " d"]);
    expect(diff("a\na", "a")).toEqual([" a", "-a"]);
    expect(diff("", "a\nb")).toEqual(["-", "+a", "+b"]);
    expect(diff("same", "same")).toEqual([" same"]);
  });

  it("replaces the whole middle of very long texts", () => {
    const text = (first: string) => Array.from({ length: 2_100 }, (_, index) => `${first}${index}`).join("\n");
    const lines = diffLines(text("a"), text("b"));
    expect(lines.filter(({ sign }) => sign === "-")).toHaveLength(2_100);
    expect(lines.filter(({ sign }) => sign === "+")).toHaveLength(2_100);
  });
});

describe("the MLflow run of a run", () => {
  const LOCAL: PageMlflow = {
    run_id: "0a1b2c",
    experiment: "digits",
    url: "",
    command: "mlflow ui --backend-store-uri sqlite:////home/ada/mlflow.db",
    install: "",
    can_start: true,
    pool: "",
  };
  const URL_OF_RUN = "http://127.0.0.1:5071/#/experiments/1/runs/0a1b2c";

  const shown = async (mlflow: PageMlflow, addresses: (MlflowAddress | Error)[] = []) => {
    const server = new FakeServer();
    server.pages = { [PAGE.run_id]: { ...PAGE, mlflow } };
    server.addresses = addresses;
    const el = addElement();
    const model = new RunPageModel(PAGE.run_id, server, controller.signal);
    mountRunPage(el, model, controller.signal);
    await model.refresh();
    return eventually(() => {
      const section = el.querySelector('[aria-label="mlflow"]');
      if (!section) throw new Error("there is no MLflow run");
      return section;
    });
  };

  it("is a link where a tracking server has its page", async () => {
    const section = await shown({ ...LOCAL, url: "https://mlflow.example/#/1", command: "", can_start: false });
    expect(section.querySelector("a")?.getAttribute("href")).toBe("https://mlflow.example/#/1");
    expect(section.querySelector("button")).toBeNull();
  });

  it("is opened by a button once mlflow ui answers, and the address stays", async () => {
    const tab = { opener: window as unknown, location: { replace: vi.fn() }, close: vi.fn() };
    const open = vi.spyOn(window, "open").mockReturnValue(tab as unknown as Window);
    const starting = { url: "", port: 5071, host: "gpu1" };
    const section = await shown(LOCAL, [starting, starting, { ...starting, url: URL_OF_RUN }]);
    section.querySelector("button")?.click();
    await eventually(() => expect(tab.location.replace).toHaveBeenCalledWith(URL_OF_RUN));
    await eventually(() => expect(section.querySelector("a")?.getAttribute("href")).toBe(URL_OF_RUN));
    expect(tab.opener).toBeNull();
    expect(section.textContent).toContain("only the server's machine reaches it");
    expect(section.textContent).not.toContain("ssh");
    open.mockRestore();
  });

  it("is requested again until it exists", async () => {
    vi.useFakeTimers();
    try {
      const server = new FakeServer();
      server.pages = { [PAGE.run_id]: { ...PAGE, mlflow: { ...LOCAL, run_id: "", can_start: false, command: "" } } };
      const el = addElement();
      const model = new RunPageModel(PAGE.run_id, server, controller.signal);
      mountRunPage(el, model, controller.signal);
      await model.refresh();
      server.pages = { [PAGE.run_id]: { ...PAGE, mlflow: LOCAL } };
      await vi.advanceTimersByTimeAsync(3_000);
      expect(model.page?.mlflow?.run_id).toBe("0a1b2c");
      const before = server.requests;
      await vi.advanceTimersByTimeAsync(30_000);
      expect(server.requests).toBe(before);
    } finally {
      vi.useRealTimers();
    }
  });

  it("says how another machine reaches it", async () => {
    vi.stubGlobal("location", { hostname: "hub.example" });
    const open = vi.spyOn(window, "open");
    const section = await shown(LOCAL, [{ url: URL_OF_RUN, port: 5071, host: "gpu1" }]);
    section.querySelector("button")?.click();
    await eventually(() => expect(section.querySelector("pre")?.textContent).toBe("ssh -N -L 5071:127.0.0.1:5071 gpu1"));
    expect(open).not.toHaveBeenCalled();
    open.mockRestore();
    vi.unstubAllGlobals();
  });

  it("says why mlflow ui has not started", async () => {
    const tab = { location: { replace: vi.fn() }, close: vi.fn() };
    const open = vi.spyOn(window, "open").mockReturnValue(tab as unknown as Window);
    const section = await shown(LOCAL, [new Error("mlflow ui has ended: no such schema")]);
    section.querySelector("button")?.click();
    await eventually(() => expect(section.querySelector('[role="alert"]')?.textContent).toBe("mlflow ui has ended: no such schema"));
    expect(tab.close).toHaveBeenCalled();
    open.mockRestore();
  });

  it("shows the commands where it can't be started", async () => {
    const install = "/venv/bin/python -m pip install mlflow==3.5.0";
    const section = await shown({ ...LOCAL, can_start: false, install });
    expect([...section.querySelectorAll("pre")].map(({ textContent }) => textContent)).toEqual([install, LOCAL.command]);
    expect(section.querySelector("button")).toBeNull();
    const elsewhere = await shown({ ...LOCAL, can_start: false, pool: "team" });
    expect(elsewhere.textContent).toContain("the machine of the pool team");
    expect([...elsewhere.querySelectorAll("pre")].map(({ textContent }) => textContent)).toEqual([LOCAL.command]);
  });
});
