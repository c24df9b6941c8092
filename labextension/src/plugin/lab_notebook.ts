import type { ISessionContext } from "@jupyterlab/apputils";
import type { INotebookModel } from "@jupyterlab/notebook";
import type { Kernel } from "@jupyterlab/services";
import type { ISignal } from "@lumino/signaling";

import type { KernelQuestionBody, KernelState, NotebookLink } from "../panel/host";
import { NoExtension } from "../panel/host";
import { CHOICE_KEY, PANEL, readSavedChoice, readReply } from "../panel/messages";
import type { KernelReply, KeptChoice } from "../panel/messages";
import { askOverControl } from "../shared/kernel_connection";
import type { KernelConnection } from "../shared/kernel_connection";
import { KernelMonitor } from "./kernel_monitor";
import type { ChoiceStore } from "./choice_store";
import type { LoadedKernels } from "./loaded_kernels";

/** A kernel that does not reply within this time is assumed not to have loaded sgpu-magic. */
export const REPLY_TIMEOUT_MS = 2_000;
/** Timeout of a kernel with sgpu-magic, whose code may block its other threads for a while. */
export const KNOWN_REPLY_TIMEOUT_MS = 10_000;
/** Timeout of requests that install packages, connect or disconnect. */
const SLOW_REPLY_TIMEOUT_MS = 60_000;

const LOAD_LINE = "%load_ext sgpu_magic";
/** Part of a kernel's banner when sgpu-magic is loaded. */
const BANNER_MARK = "sgpu-magic";
const NOT_LOADED = "This kernel has not loaded sgpu-magic.";
const OTHER_VERSION = "This kernel has loaded another version of sgpu-magic than this page. Restart the kernel.";
const SILENT = "The kernel does not answer: the code running in it blocks everything else. It is asked again automatically.";
const RESTARTED = "The kernel was restarted.";

/** The part of a notebook's document that is used here. */
export interface NotebookDocument {
  readonly path: string;
  readonly pathChanged: ISignal<unknown, string>;
  readonly isReady: boolean;
  readonly ready: Promise<void>;
  readonly model: Pick<INotebookModel, "getMetadata" | "setMetadata" | "metadataChanged" | "sharedModel"> | null;
}

/** What a notebook uses of its page. */
export interface NotebookOptions {
  readonly document: NotebookDocument;
  readonly session: ISessionContext;
  /** The choices that were sent to the page's kernels. */
  readonly choices: ChoiceStore;
  /** The kernels that have loaded sgpu-magic. */
  readonly loaded: LoadedKernels;
  /** Whether the panel is visible. */
  isPanelVisible(): boolean;
  /** Whether this notebook is the active one. */
  isActive(): boolean;
  /** Makes this cell the active one, and scrolls to it. */
  showCell(index: number): void;
  /** Runs the active cell. */
  runActiveCell(): void;
  /** Asks the user for a kernel. */
  selectKernel(): Promise<void>;
}

/** One of JupyterLab's notebooks and its kernel. */
export class LabNotebook implements NotebookLink {
  /** Whether the kernel has answered since its last restart. */
  isKnown = false;

  private readonly monitor: KernelMonitor;
  private readonly callbacks = new Set<() => void>();
  private readonly pending = new Set<AbortController>();
  private sendingChoice: string | null = null;
  /** Whether the kernel's process reports that it has loaded sgpu-magic; null before the first request. */
  private loadedRequest: Promise<boolean> | null = null;
  private hasMissedChanges = false;
  private questionNumber = 0;

  constructor(
    private readonly options: NotebookOptions,
    private readonly signal: AbortSignal,
  ) {
    const { document, session } = options;
    this.monitor = new KernelMonitor(
      session,
      {
        // when a cell starts, the choice is sent at its end instead
        onChange: () => this.notify(this.kernelState !== "busy"),
        onCellEnd: () => this.notify(),
        onReplaced: (isOtherKernel) => this.onKernelReplaced(isOtherKernel),
        onLoadedChange: (isLoaded) => {
          this.setLoaded(this.monitor.kernelId, isLoaded);
          // the extension finishes loading after the end of the cell that loads it
          this.notify();
        },
      },
      signal,
    );
    const onPathChange = (): void => this.notify();
    document.pathChanged.connect(onPathChange);
    signal.addEventListener(
      "abort",
      () => {
        document.pathChanged.disconnect(onPathChange);
        this.callbacks.clear();
        this.abortPending("The notebook was closed.");
      },
      { once: true },
    );
    void document.ready.then(() => this.onDocumentReady());
  }

  get name(): string {
    return this.options.document.path.split("/").at(-1) ?? "";
  }

  get kernel(): string {
    return this.monitor.kernelId;
  }

  get kernelState(): KernelState {
    // the notebook's metadata can't be read before its document is ready
    return this.options.document.isReady ? this.monitor.state : "starting";
  }

  get savedChoice(): KeptChoice | null {
    return readSavedChoice(this.options.document.model?.getMetadata(CHOICE_KEY));
  }

  onChange(callback: () => void): () => void {
    this.callbacks.add(callback);
    return () => this.callbacks.delete(callback);
  }

  async ask(question: KernelQuestionBody): Promise<KernelReply> {
    const { connection } = this.monitor;
    if (!connection) throw new Error("This notebook has no kernel.");
    const kernel = this.monitor.kernelId;
    this.questionNumber += 1;
    const controller = new AbortController();
    this.pending.add(controller);
    let timer: ReturnType<typeof setTimeout> | undefined;
    const timeout = new Promise<never>((_, reject) => {
      controller.signal.addEventListener("abort", () => reject(controller.signal.reason as Error), { once: true });
    });
    const setTimer = (): void => {
      clearTimeout(timer);
      timer = setTimeout(() => controller.abort(this.timeoutError()), this.replyTimeout_ms(question.kind));
    };
    setTimer();
    try {
      if (!(await this.hasLoaded(connection, timeout))) throw new NoExtension(NOT_LOADED);
      setTimer();
      const kernelConnection = connection as unknown as KernelConnection;
      const asked = askOverControl(kernelConnection, PANEL, { ...question, n: this.questionNumber }, controller.signal);
      // prevents an unhandled rejection after the timeout
      asked.catch(() => undefined);
      const reply = await Promise.race([asked.catch((error: unknown) => this.throwKernelError(error, controller.signal)), timeout]);
      const answer = this.parseReply(reply);
      if (question.kind === "kernel") this.recordSentChoice(kernel, question.kept);
      if (answer.kind === "kernel-answer" && answer.kept) this.recordSentChoice(kernel, answer.kept);
      return answer;
    } finally {
      clearTimeout(timer);
      this.pending.delete(controller);
    }
  }

  saveChoice(kept: KeptChoice): void {
    this.options.document.model?.setMetadata(CHOICE_KEY, kept);
  }

  readonly loadExtension = (): void => {
    const model = this.options.document.model;
    if (!model) return;
    const { cells } = model.sharedModel;
    const found = cells.findIndex((cell) => cell.cell_type === "code" && loads(cell.getSource()));
    if (found < 0) model.sharedModel.insertCell(0, { cell_type: "code", source: LOAD_LINE, metadata: { trusted: true } });
    this.options.showCell(Math.max(found, 0));
    if (found < 0 || cells[found]?.getSource().trim() === LOAD_LINE) this.options.runActiveCell();
    // the cell's other lines are the user's to run
    else this.options.session.session?.kernel?.requestExecute({ code: LOAD_LINE, store_history: false });
  };

  readonly startKernel = async (): Promise<void> => {
    const { session } = this.options;
    const { state, connection } = this.monitor;
    if (state === "disconnected" && connection) await connection.reconnect();
    else if (state === "dead" && session.session?.kernel) await session.restartKernel();
    else if (await session.startKernel()) await this.options.selectKernel();
  };

  /** Reports the changes that the panel has missed while it was hidden. */
  onPanelShown(): void {
    if (!this.hasMissedChanges) return;
    this.hasMissedChanges = false;
    for (const callback of [...this.callbacks]) callback();
  }

  /**
   * Sends the notebook's choice to the kernel, unless the kernel has it.
   *
   * If several notebooks share the kernel, only the active one replaces a choice. A notebook without a choice is
   * never the first to send: its kernel may not use sgpu-magic.
   */
  async sendChoice(): Promise<void> {
    const { savedChoice, kernel, kernelState } = this;
    if (this.signal.aborted || kernel === "" || (kernelState !== "idle" && kernelState !== "busy")) return;
    const { choices } = this.options;
    const written = JSON.stringify(savedChoice);
    if (choices.has(kernel, written) || this.sendingChoice === written) return;
    if (choices.hasAny(kernel) ? !this.options.isActive() : savedChoice === null) return;
    this.sendingChoice = written;
    try {
      const reply = await this.ask({ kind: "kernel", kept: savedChoice });
      if (reply.kind === "kernel-answer" && reply.kept && JSON.stringify(reply.kept) !== written) this.saveChoice(reply.kept);
    } catch {
      // sgpu-magic is not loaded, or the kernel is blocked: retried after the next cell
    } finally {
      this.sendingChoice = null;
    }
  }

  // ---------------------------------------------------------------- events

  private onDocumentReady(): void {
    const { model } = this.options.document;
    if (this.signal.aborted || !model) return;
    const onMetadataChange = (_: unknown, change: { readonly key: string }): void => {
      if (change.key === CHOICE_KEY) this.notify();
    };
    model.metadataChanged.connect(onMetadataChange);
    this.signal.addEventListener("abort", () => model.metadataChanged.disconnect(onMetadataChange), { once: true });
    this.notify();
  }

  private notify(sendsChoice = true): void {
    if (this.signal.aborted) return;
    if (this.options.isPanelVisible()) for (const callback of [...this.callbacks]) callback();
    // a hidden panel sends no requests to kernels
    else this.hasMissedChanges = true;
    if (sendsChoice) void this.sendChoice();
  }

  private onKernelReplaced(isOtherKernel: boolean): void {
    this.isKnown = false;
    this.loadedRequest = null;
    // another kernel may have been recorded as loaded before this notebook used it
    if (!isOtherKernel) this.options.loaded.delete(this.monitor.kernelId);
    this.options.choices.delete(this.monitor.kernelId);
    this.abortPending(RESTARTED);
  }

  private abortPending(reason: string): void {
    for (const controller of [...this.pending]) controller.abort(new Error(reason));
  }

  // ---------------------------------------------------------------- requests

  private setLoaded(kernel: string, isLoaded: boolean): void {
    const { loaded } = this.options;
    if (isLoaded) loaded.add(kernel);
    else loaded.delete(kernel);
    this.loadedRequest = Promise.resolve(isLoaded);
    if (!isLoaded) this.isKnown = false;
  }

  /**
   * Returns whether the kernel has loaded sgpu-magic.
   *
   * The kernel is asked once per process, on the main shell, where every kernel replies. It announces later changes.
   *
   * @param timeout: Rejects when the request has timed out; a busy kernel replies after its cell.
   */
  private async hasLoaded(connection: Kernel.IKernelConnection, timeout: Promise<never>): Promise<boolean> {
    const kernel = this.monitor.kernelId;
    if (this.options.loaded.has(kernel)) return true;
    const request = (this.loadedRequest ??= this.requestLoaded(connection));
    let hasTimedOut = false;
    void request.then((isLoaded) => {
      if (this.loadedRequest !== request || !isLoaded) return;
      this.options.loaded.add(kernel);
      if (hasTimedOut) this.notify();
    });
    try {
      return await Promise.race([request, timeout]);
    } catch (error) {
      hasTimedOut = true;
      throw error;
    }
  }

  private async requestLoaded(connection: Kernel.IKernelConnection): Promise<boolean> {
    try {
      const content = (await connection.requestKernelInfo())?.content;
      return content !== undefined && "banner" in content && content.banner.includes(BANNER_MARK);
    } catch {
      // the connection was closed; the next request tries again
      this.loadedRequest = null;
      return false;
    }
  }

  private replyTimeout_ms(kind: KernelQuestionBody["kind"]): number {
    if (!this.isKnown) return REPLY_TIMEOUT_MS;
    return kind === "kernel" ? KNOWN_REPLY_TIMEOUT_MS : SLOW_REPLY_TIMEOUT_MS;
  }

  private timeoutError(): Error {
    // a busy kernel can't report whether it has loaded sgpu-magic
    const isUnknown = this.kernelState === "busy" && !this.options.loaded.has(this.kernel);
    return this.isKnown || isUnknown ? new Error(SILENT) : new NoExtension(NOT_LOADED);
  }

  /** Throws the panel's error for a request that the kernel does not know, or whose connection was closed. */
  private throwKernelError(error: unknown, signal: AbortSignal): never {
    if (signal.aborted) throw signal.reason as Error;
    if (this.isKnown || this.kernelState === "dead") throw new Error(SILENT, { cause: error });
    throw new NoExtension(NOT_LOADED);
  }

  private parseReply(reply: unknown): KernelReply {
    // a reply of a version that has views of runs but no panel
    if ((reply as { readonly kind?: unknown } | null)?.kind === "refusal") throw new NoExtension(OTHER_VERSION);
    const read = readReply(reply);
    this.isKnown = true;
    return read;
  }

  private recordSentChoice(kernel: string, kept: KeptChoice | null): void {
    if (kernel === this.monitor.kernelId) this.options.choices.set(kernel, JSON.stringify(kept));
  }
}

/** Whether one of a cell's lines loads the extension. */
function loads(source: string): boolean {
  return source.split("\n").some((line) => line.trim() === LOAD_LINE);
}
