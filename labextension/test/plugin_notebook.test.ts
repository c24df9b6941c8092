import type { ISessionContext } from "@jupyterlab/apputils";
import { Signal } from "@lumino/signaling";
import { afterEach, beforeEach, describe, expect, it, vi } from "vitest";

import { NoExtension } from "../src/panel/host";
import type { KernelQuestionBody } from "../src/panel/host";
import { CHOICE_KEY, OtherVersion } from "../src/panel/messages";
import type { KernelAnswer, KeptChoice } from "../src/panel/messages";
import { chipLabel } from "../src/plugin/chip_label";
import { connectLine } from "../src/plugin/magic_lines";
import { ChoiceStore } from "../src/plugin/choice_store";
import { LabNotebook, REPLY_TIMEOUT_MS, KNOWN_REPLY_TIMEOUT_MS } from "../src/plugin/lab_notebook";
import type { NotebookDocument } from "../src/plugin/lab_notebook";
import { LoadedKernels } from "../src/plugin/loaded_kernels";
import { createTranslate } from "../src/plugin/translation";
import { KERNEL, kernelAnswer, kernelSnapshot, NOW, poolSnapshot, SESSION } from "./panel_samples";

const CHOICE: KeptChoice = {
  choice: { gpus: 2, type: "a10", pool: "", env_version: "", dependencies: [], removed: [] },
  version: 1,
};

function answer(change: Partial<KernelAnswer> = {}): KernelAnswer {
  return kernelAnswer(kernelSnapshot(), change);
}

interface Question {
  readonly kind: string;
  readonly n: number;
  readonly kept?: KeptChoice | null;
}

/** A kernel connection of JupyterLab. `reply` returns the kernel's answer; without it, the kernel does not answer. */
class FakeKernel {
  status = "idle";
  connectionStatus = "connected";
  readonly questions: Question[] = [];
  disposedFutures = 0;
  reply: ((question: Question) => unknown) | undefined = ({ n }) => answer({ n });
  readonly requestExecute = vi.fn();
  readonly reconnect = vi.fn(() => Promise.resolve());
  banner = "Python 3.12\nsgpu-magic 1.0 is loaded.";
  readonly requestKernelInfo = vi.fn(() => Promise.resolve({ content: { banner: this.banner } }));

  constructor(readonly id = KERNEL) {}

  sendControlMessage(message: { content: { question: Question; model_id: string } }): unknown {
    const { question, model_id } = message.content;
    expect(model_id).toBe("panel");
    this.questions.push(question);
    const { reply } = this;
    const future = {
      onReply: (() => undefined) as (message: unknown) => void,
      done: new Promise(() => undefined),
      dispose: () => void (this.disposedFutures += 1),
    };
    if (reply) {
      void Promise.resolve().then(() => future.onReply({ content: { status: "ok", answer: reply(question) } }));
    }
    return future;
  }
}

class FakeSession {
  kernel: FakeKernel | null;
  isRestarting = false;
  readonly kernelChanged = new Signal<this, unknown>(this);
  readonly statusChanged = new Signal<this, unknown>(this);
  readonly connectionStatusChanged = new Signal<this, unknown>(this);
  readonly iopubMessage = new Signal<this, unknown>(this);
  readonly startKernel = vi.fn(() => Promise.resolve(true));
  readonly restartKernel = vi.fn(() => Promise.resolve());

  constructor(kernel: FakeKernel | null) {
    this.kernel = kernel;
  }

  get session(): unknown {
    const { kernel } = this;
    return kernel ? { kernel } : null;
  }

  get kernelDisplayStatus(): string {
    if (this.isRestarting) return "restarting";
    const { kernel } = this;
    if (!kernel) return "unknown";
    return kernel.connectionStatus === "connected" ? kernel.status : kernel.connectionStatus;
  }

  setStatus(status: string): void {
    if (this.kernel) this.kernel.status = status;
    this.statusChanged.emit(status);
  }

  setKernel(kernel: FakeKernel | null): void {
    this.kernel = kernel;
    this.kernelChanged.emit({});
  }

  /** Publishes the kernel's status during a request. */
  publishStatus(state: "busy" | "idle", asked: string, process = "process-1"): void {
    if (this.kernel) this.kernel.status = state;
    this.statusChanged.emit(state);
    this.iopubMessage.emit({
      header: { msg_type: "status", session: process },
      parent_header: { msg_type: asked },
      content: { execution_state: state },
    });
  }

  /** Publishes that a cell has loaded or unloaded sgpu-magic. */
  publishLoaded(loaded: boolean, process = "process-1"): void {
    this.iopubMessage.emit({
      header: { msg_type: "update_display_data", session: process },
      parent_header: { msg_type: "execute_request" },
      content: { data: {}, metadata: { sgpu_magic: { loaded } }, transient: { display_id: "sgpu-magic" } },
    });
  }

  runCell(process?: string): void {
    this.publishStatus("busy", "execute_request", process);
    this.publishStatus("idle", "execute_request", process);
  }
}

class FakeModel {
  readonly metadata = new Map<string, unknown>();
  readonly sources: string[] = ["print(1)"];
  readonly metadataChanged = new Signal<this, { key: string }>(this);

  getMetadata(key: string): unknown {
    return this.metadata.get(key);
  }

  setMetadata(key: string, value: unknown): void {
    this.metadata.set(key, value);
    this.metadataChanged.emit({ key });
  }

  get sharedModel(): unknown {
    return {
      cells: this.sources.map((source) => ({ cell_type: "code", getSource: () => source })),
      insertCell: (at: number, cell: { source: string }) => this.sources.splice(at, 0, cell.source),
    };
  }
}

class FakeDocument {
  path = "work/train.ipynb";
  isReady = true;
  ready = Promise.resolve();
  readonly pathChanged = new Signal<this, string>(this);
  constructor(readonly model: FakeModel) {}
}

let kernel: FakeKernel;
let session: FakeSession;
let model: FakeModel;
let notebookFile: FakeDocument;
let choices: ChoiceStore;
let loaded: LoadedKernels;
let controller: AbortController;
let isPanelVisible: boolean;
let isActive: boolean;
let showCell: ReturnType<typeof vi.fn<(index: number) => void>>;
let runActiveCell: ReturnType<typeof vi.fn<() => void>>;
let selectKernel: ReturnType<typeof vi.fn<() => Promise<void>>>;

function openNotebook(options: { session: FakeSession; document: FakeDocument } = { session, document: notebookFile }): LabNotebook {
  return new LabNotebook(
    {
      document: options.document as unknown as NotebookDocument,
      session: options.session as unknown as ISessionContext,
      choices,
      loaded,
      isPanelVisible: () => isPanelVisible,
      isActive: () => isActive,
      showCell,
      runActiveCell,
      selectKernel,
    },
    controller.signal,
  );
}

beforeEach(() => {
  vi.useFakeTimers();
  kernel = new FakeKernel();
  session = new FakeSession(kernel);
  model = new FakeModel();
  notebookFile = new FakeDocument(model);
  choices = new ChoiceStore();
  loaded = new LoadedKernels(null);
  controller = new AbortController();
  isPanelVisible = true;
  isActive = true;
  showCell = vi.fn<(index: number) => void>();
  runActiveCell = vi.fn<() => void>();
  selectKernel = vi.fn<() => Promise<void>>(() => Promise.resolve());
});

afterEach(() => {
  controller.abort();
  vi.useRealTimers();
});

const advance = (ms = 0): Promise<unknown> => vi.advanceTimersByTimeAsync(ms);
const ask: KernelQuestionBody = { kind: "kernel", kept: null };

describe("a question to a notebook's kernel", () => {
  it("is sent over the control channel and answered", async () => {
    const notebook = openNotebook();
    const reply = await notebook.ask(ask);
    expect(reply.kind).toBe("kernel-answer");
    expect(kernel.questions).toEqual([{ kind: "kernel", kept: null, n: 1 }]);
    expect(notebook.isKnown).toBe(true);
  });

  it("fails as not loaded if the kernel does not answer in two seconds", async () => {
    kernel.reply = undefined;
    const notebook = openNotebook();
    const asked = notebook.ask(ask);
    const caught = expect(asked).rejects.toThrow(NoExtension);
    await advance(REPLY_TIMEOUT_MS);
    await caught;
    await expect(asked).rejects.toThrow("This kernel has not loaded sgpu-magic.");
    // the request's future was disposed
    expect(kernel.disposedFutures).toBe(1);
  });

  it("is sent only if the kernel has loaded sgpu-magic", async () => {
    kernel.banner = "Python 3.12";
    const notebook = openNotebook();
    for (let attempt = 0; attempt < 2; attempt += 1) {
      await expect(notebook.ask(ask)).rejects.toThrow(NoExtension);
    }
    expect(kernel.questions).toEqual([]);
    expect(kernel.requestKernelInfo).toHaveBeenCalledOnce();
    session.publishLoaded(true);
    await notebook.ask(ask);
    expect(kernel.questions).toHaveLength(1);
    session.publishLoaded(false);
    await expect(notebook.ask(ask)).rejects.toThrow(NoExtension);
    expect(kernel.questions).toHaveLength(1);
    expect(kernel.requestKernelInfo).toHaveBeenCalledOnce();
  });

  it("triggers a change when sgpu-magic is loaded or unloaded", () => {
    const notebook = openNotebook();
    const changed = vi.fn();
    notebook.onChange(changed);
    session.runCell();
    changed.mockClear();
    session.publishLoaded(true);
    expect(changed).toHaveBeenCalledOnce();
  });

  it("is sent to a restarted kernel only after checking it again", async () => {
    const notebook = openNotebook();
    session.publishLoaded(true);
    await notebook.ask(ask);
    kernel.banner = "Python 3.12";
    session.setStatus("restarting");
    session.setStatus("idle");
    await expect(notebook.ask(ask)).rejects.toThrow(NoExtension);
    expect(kernel.questions).toHaveLength(1);
  });

  it("waits for the end of a cell if it is unknown whether the kernel has loaded sgpu-magic", async () => {
    let answerInfo: (value: { content: { banner: string } }) => void = () => undefined;
    kernel.requestKernelInfo.mockImplementation(() => new Promise((resolve) => (answerInfo = resolve)));
    session.publishStatus("busy", "execute_request");
    const notebook = openNotebook();
    const changed = vi.fn();
    notebook.onChange(changed);
    const asked = notebook.ask(ask);
    const caught = expect(asked).rejects.toThrow("The kernel does not answer");
    await advance(REPLY_TIMEOUT_MS);
    await caught;
    await expect(asked).rejects.not.toThrow(NoExtension);
    changed.mockClear();
    answerInfo({ content: { banner: kernel.banner } });
    await advance();
    expect(changed).toHaveBeenCalledOnce();
    await notebook.ask(ask);
    expect(kernel.questions).toHaveLength(1);
  });

  it("is sent at once after a page reload while the kernel is busy", async () => {
    const kept = new Map<string, string>();
    const store = { getItem: (key: string) => kept.get(key) ?? null, setItem: (key: string, value: string) => void kept.set(key, value) };
    loaded = new LoadedKernels(store);
    await openNotebook().ask(ask);
    loaded = new LoadedKernels(store);
    kernel.requestKernelInfo.mockImplementation(() => new Promise(() => undefined));
    await openNotebook().ask(ask);
    expect(kernel.questions).toHaveLength(2);
    // the stored value may be invalid
    expect(new LoadedKernels({ ...store, getItem: () => "{nonsense" }).has(KERNEL)).toBe(false);
  });

  it("has a longer timeout if the kernel has answered before", async () => {
    const notebook = openNotebook();
    await notebook.ask(ask);
    kernel.reply = undefined;
    const asked = notebook.ask(ask);
    const caught = expect(asked).rejects.not.toThrow(NoExtension);
    let isSettled = false;
    asked.catch(() => (isSettled = true));
    await advance(REPLY_TIMEOUT_MS);
    expect(isSettled).toBe(false);
    await advance(KNOWN_REPLY_TIMEOUT_MS);
    await caught;
    expect(isSettled).toBe(true);
  });

  it("is aborted by a restart of the kernel", async () => {
    const notebook = openNotebook();
    await notebook.ask(ask);
    kernel.reply = undefined;
    const asked = notebook.ask({ kind: "apply", choice: CHOICE.choice, connect: true, confirmed: false });
    const caught = expect(asked).rejects.toThrow("The kernel was restarted.");
    session.setStatus("restarting");
    await caught;
    expect(notebook.isKnown).toBe(false);
  });

  it("distinguishes another version from no extension", async () => {
    const notebook = openNotebook();
    kernel.reply = () => answer({ snapshot: { ...answer().snapshot, version: 99 } });
    await expect(notebook.ask(ask)).rejects.toThrow(OtherVersion);
    kernel.reply = () => ({ kind: "refusal", n: 1, text: "This view is no longer live" });
    await expect(notebook.ask(ask)).rejects.toThrow("another version");
  });

  it("fails without a kernel", async () => {
    session.setKernel(null);
    await expect(openNotebook().ask(ask)).rejects.toThrow("This notebook has no kernel.");
  });
});

describe("a notebook's state", () => {
  it("follows its kernel", () => {
    const notebook = openNotebook();
    const states = [notebook.kernelState];
    notebook.onChange(() => states.push(notebook.kernelState));
    session.publishStatus("busy", "execute_request");
    session.publishStatus("idle", "execute_request");
    session.isRestarting = true;
    session.statusChanged.emit("restarting");
    session.isRestarting = false;
    session.setStatus("idle");
    if (session.kernel) session.kernel.connectionStatus = "connecting";
    session.connectionStatusChanged.emit("connecting");
    if (session.kernel) session.kernel.connectionStatus = "connected";
    session.setStatus("dead");
    session.setKernel(null);
    expect(states).toEqual(["idle", "busy", "idle", "restarting", "idle", "disconnected", "dead", "none"]);
    expect(notebook.kernel).toBe("");
  });

  it("does not change during questions, which JupyterLab reports as busy", () => {
    const notebook = openNotebook();
    const changed = vi.fn();
    notebook.onChange(changed);
    session.publishStatus("busy", "sgpu_request");
    session.publishStatus("idle", "sgpu_request");
    expect(changed).not.toHaveBeenCalled();
    session.publishStatus("busy", "execute_request");
    changed.mockClear();
    session.publishStatus("busy", "sgpu_request");
    session.publishStatus("idle", "sgpu_request");
    expect(notebook.kernelState).toBe("busy");
    expect(changed).not.toHaveBeenCalled();
    session.publishStatus("idle", "execute_request");
    expect(changed).toHaveBeenCalledOnce();
  });

  it("is busy for a kernel whose cell started before the page was loaded", () => {
    kernel.status = "unknown";
    expect(openNotebook().kernelState).toBe("busy");
  });

  it("is starting until its document is ready", async () => {
    notebookFile.isReady = false;
    const notebook = openNotebook();
    expect(notebook.kernelState).toBe("starting");
    notebookFile.isReady = true;
    const changed = vi.fn();
    notebook.onChange(changed);
    await advance();
    expect(changed).toHaveBeenCalled();
    expect(notebook.kernelState).toBe("idle");
  });

  it("has its file's name, and follows a rename", () => {
    const notebook = openNotebook();
    const changed = vi.fn();
    notebook.onChange(changed);
    expect(notebook.name).toBe("train.ipynb");
    notebookFile.path = "eval.ipynb";
    notebookFile.pathChanged.emit("eval.ipynb");
    expect(changed).toHaveBeenCalledOnce();
    expect(notebook.name).toBe("eval.ipynb");
  });

  it("detects a restart by another page", async () => {
    const notebook = openNotebook();
    session.runCell("process-1");
    await notebook.ask(ask);
    session.runCell("process-2");
    expect(notebook.isKnown).toBe(false);
  });

  it("is reported once to a panel that was hidden when it changed", async () => {
    isPanelVisible = false;
    const notebook = openNotebook();
    const changed = vi.fn();
    notebook.onChange(changed);
    session.runCell();
    session.runCell();
    expect(changed).not.toHaveBeenCalled();
    isPanelVisible = true;
    notebook.onPanelShown();
    notebook.onPanelShown();
    expect(changed).toHaveBeenCalledOnce();
    await advance();
    expect(kernel.questions).toEqual([]);
  });
});

describe("a notebook's saved choice", () => {
  it("is read from its metadata", () => {
    const notebook = openNotebook();
    expect(notebook.savedChoice).toBeNull();
    notebook.saveChoice(CHOICE);
    expect(notebook.savedChoice).toEqual(CHOICE);
    model.setMetadata(CHOICE_KEY, { choice: "nonsense" });
    expect(notebook.savedChoice).toBeNull();
  });

  it("is sent to the kernel even if the panel is hidden, until it is received", async () => {
    isPanelVisible = false;
    model.metadata.set(CHOICE_KEY, CHOICE);
    kernel.reply = undefined;
    openNotebook();
    await advance();
    expect(kernel.questions.map(({ kept }) => kept)).toEqual([CHOICE]);
    await advance(REPLY_TIMEOUT_MS);
    // a cell loads the extension
    kernel.reply = ({ n }) => answer({ n });
    session.runCell();
    await advance();
    expect(kernel.questions).toHaveLength(2);
    session.runCell();
    await advance();
    expect(kernel.questions).toHaveLength(2);
    // a new process has no choice
    session.setStatus("restarting");
    session.setStatus("idle");
    await advance();
    expect(kernel.questions).toHaveLength(3);
    model.setMetadata(CHOICE_KEY, { ...CHOICE, choice: { ...CHOICE.choice, gpus: 3 } });
    await advance();
    expect(kernel.questions.at(-1)?.kept?.choice.gpus).toBe(3);
  });

  it("is not sent if there is none, because the kernel may not use pools", async () => {
    openNotebook();
    await advance();
    session.runCell();
    await advance();
    expect(kernel.questions).toEqual([]);
  });

  it("is sent only by the active notebook if several share a kernel", async () => {
    model.metadata.set(CHOICE_KEY, CHOICE);
    openNotebook();
    await advance();
    const other = new FakeDocument(new FakeModel());
    isActive = false;
    const second = openNotebook({ session, document: other });
    await advance();
    session.runCell();
    await advance();
    expect(kernel.questions.map(({ kept }) => kept)).toEqual([CHOICE]);
    isActive = true;
    await second.sendChoice();
    expect(kernel.questions.map(({ kept }) => kept)).toEqual([CHOICE, null]);
  });

  it("is updated from the kernel's answer", async () => {
    const chosen = { ...CHOICE, choice: { ...CHOICE.choice, gpus: 3 } };
    model.metadata.set(CHOICE_KEY, CHOICE);
    kernel.reply = ({ n }) => answer({ n, kept: chosen });
    const notebook = openNotebook();
    await advance();
    expect(notebook.savedChoice).toEqual(chosen);
    expect(kernel.questions).toHaveLength(1);
  });
});

describe("a notebook's actions", () => {
  it("insert the cell that loads the extension once, and run it", () => {
    const notebook = openNotebook();
    notebook.loadExtension();
    notebook.loadExtension();
    expect(model.sources).toEqual(["%load_ext sgpu_magic", "print(1)"]);
    expect(showCell.mock.calls).toEqual([[0], [0]]);
    expect(runActiveCell).toHaveBeenCalledTimes(2);
    expect(kernel.requestExecute).not.toHaveBeenCalled();
  });

  it("run only the line that loads the extension, in a cell with others", () => {
    const notebook = openNotebook();
    model.sources.splice(0, 1, "%load_ext sgpu_magic\n%sgpu_connect -n 4");
    notebook.loadExtension();
    expect(model.sources).toEqual(["%load_ext sgpu_magic\n%sgpu_connect -n 4"]);
    expect(showCell.mock.calls).toEqual([[0]]);
    expect(runActiveCell).not.toHaveBeenCalled();
    expect(kernel.requestExecute).toHaveBeenCalledExactlyOnceWith({ code: "%load_ext sgpu_magic", store_history: false });
  });

  it("start, restart or reconnect a kernel according to its state", async () => {
    const notebook = openNotebook();
    kernel.connectionStatus = "disconnected";
    session.connectionStatusChanged.emit("disconnected");
    await notebook.startKernel();
    expect(kernel.reconnect).toHaveBeenCalledOnce();
    session.setStatus("dead");
    await notebook.startKernel();
    expect(session.restartKernel).toHaveBeenCalledOnce();
    session.setKernel(null);
    await notebook.startKernel();
    expect(session.startKernel).toHaveBeenCalledOnce();
    expect(selectKernel).toHaveBeenCalledOnce();
  });
});

describe("labels", () => {
  it("show a session in its notebook's toolbar", () => {
    const t = createTranslate({ __: (text, ...values) => text.replace(/%(\d)/g, (_, at) => values[Number(at) - 1] ?? "") });
    const words = (change: object): string => chipLabel({ ...SESSION, ...change }, poolSnapshot(), NOW, t).replaceAll("\u00a0", " ");
    expect(words({})).toBe("2 × A10 · connected · 12 min");
    expect(words({ dead_ranks: [1] })).toBe("2 × A10 · rank 1 dead");
    expect(words({ dead_ranks: [0, 1] })).toBe("2 × A10 · ranks 0, 1 dead");
    expect(words({ dead_ranks: [0, 1, 2, 3] })).toBe("2 × A10 · 4 ranks dead");
    expect(words({ state: "cancelling", dead_ranks: [1] })).toBe("2 × A10 · ending");
    expect(words({ state: "queued", started_at: null })).toBe("2 × A10 · waiting");
    expect(words({ state: "preparing", started_at: null })).toBe("2 × A10 · connecting");
    expect(words({ state: "cancelling" })).toBe("2 × A10 · ending");
  });

  it("connect a session again with its devices, name and pool", () => {
    const session = { ...SESSION, name: "session main", ranks: 2, device_type: "a10" };
    expect(connectLine(session, "")).toBe("%sgpu_connect --gpus 2 --type a10");
    expect(connectLine({ ...session, name: "session work", device_type: "any" }, "team")).toBe(
      "%sgpu_connect --gpus 2 --name work --pool team",
    );
  });

  it("keep the %% of a cell magic, which JupyterLab's catalogues escape", () => {
    const t = createTranslate({ __: (text, ...values) => text.replaceAll("%%", "%").replace("%1", values[0] ?? "") });
    expect(t("Cells that begin with %%distributed appear here.")).toBe("Cells that begin with %%distributed appear here.");
    expect(t("Run %load_ext sgpu_magic, %1.", 3)).toBe("Run %load_ext sgpu_magic, 3.");
  });
});
