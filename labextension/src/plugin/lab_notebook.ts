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
import { FollowedKernel } from "./followed_kernel";
import type { ChoiceStore } from "./choice_store";
import type { LoadedKernels } from "./loaded_kernels";

/** A kernel that does not reply within this time counts as one without sgpu-magic. */
export const PATIENCE_MS = 2_000;
/** For a kernel with sgpu-magic: the code that it runs may block everything else for a while. */
export const KNOWN_PATIENCE_MS = 10_000;
/** For requests that install, connect and disconnect. */
export const SLOW_PATIENCE_MS = 60_000;

const LOAD = "%load_ext sgpu_magic";
/** Part of a kernel's banner when sgpu-magic is loaded. */
const IN_BANNER = "sgpu-magic";
const NOT_LOADED = "This kernel has not loaded sgpu-magic.";
const OTHER_VERSION = "This kernel has loaded another version of sgpu-magic than this page. Restart the kernel.";
const SILENT = "The kernel does not answer: the code running in it blocks everything else. It is asked again automatically.";
const RESTARTED = "The kernel was restarted.";

/** The part of a notebook's document that is used here. */
export interface Document {
  readonly path: string;
  readonly pathChanged: ISignal<unknown, string>;
  readonly isReady: boolean;
  readonly ready: Promise<void>;
  readonly model: Pick<INotebookModel, "getMetadata" | "setMetadata" | "metadataChanged" | "sharedModel"> | null;
}

/** What a notebook needs from its page. */
export interface Surroundings {
  readonly context: Document;
  readonly session: ISessionContext;
  /** The choices that were sent to the page's kernels. */
  readonly choices: ChoiceStore;
  /** The kernels that have loaded sgpu-magic. */
  readonly loaded: LoadedKernels;
  /** Whether the panel is visible. */
  isLooked(): boolean;
  /** Whether this notebook is the one in front. */
  isFront(): boolean;
  /** Makes this cell the active one, and shows it. */
  showCell(index: number): void;
  /** Asks the user for a kernel. */
  selectKernel(): Promise<void>;
}

/** One of JupyterLab's notebooks and its kernel. */
export class LabNotebook implements NotebookLink {
  /** The kernel has answered, and was not restarted since. */
  isKnown = false;

  private readonly kernelOf: FollowedKernel;
  private readonly callbacks = new Set<() => void>();
  private readonly waiting = new Set<AbortController>();
  private telling: string | null = null;
  /** Whether the kernel's process reports that it has loaded sgpu-magic; null before the first request. */
  private looking: Promise<boolean> | null = null;
  private isLate = false;
  private count = 0;

  constructor(
    private readonly around: Surroundings,
    private readonly signal: AbortSignal,
  ) {
    const { context, session } = around;
    this.kernelOf = new FollowedKernel(
      session,
      {
        // when a cell starts, the choice is sent at its end instead
        changed: () => this.changed(this.kernelState !== "busy"),
        cellEnded: () => this.changed(),
        replaced: (isOtherKernel) => this.replaced(isOtherKernel),
        announced: (isLoaded) => {
          this.setLoaded(this.kernelOf.kernelId, isLoaded);
          // the extension finishes loading after the end of the cell that loads it
          this.changed();
        },
      },
      signal,
    );
    const pathChanged = (): void => this.changed();
    context.pathChanged.connect(pathChanged);
    signal.addEventListener(
      "abort",
      () => {
        context.pathChanged.disconnect(pathChanged);
        this.callbacks.clear();
        this.drop("The notebook was closed.");
      },
      { once: true },
    );
    void context.ready.then(() => this.opened());
  }

  get name(): string {
    return this.around.context.path.split("/").at(-1) ?? "";
  }

  get kernel(): string {
    return this.kernelOf.kernelId;
  }

  get kernelState(): KernelState {
    // the notebook's metadata can't be read before
    return this.around.context.isReady ? this.kernelOf.state : "starting";
  }

  get savedChoice(): KeptChoice | null {
    return readSavedChoice(this.around.context.model?.getMetadata(CHOICE_KEY));
  }

  onChange(callback: () => void): () => void {
    this.callbacks.add(callback);
    return () => this.callbacks.delete(callback);
  }

  async ask(question: KernelQuestionBody): Promise<KernelReply> {
    const { connection } = this.kernelOf;
    if (!connection) throw new Error("This notebook has no kernel.");
    const kernel = this.kernelOf.kernelId;
    this.count += 1;
    const end = new AbortController();
    this.waiting.add(end);
    let timer: ReturnType<typeof setTimeout> | undefined;
    const given = new Promise<never>((_, reject) => {
      end.signal.addEventListener("abort", () => reject(end.signal.reason as Error), { once: true });
    });
    const setTimer = (): void => {
      clearTimeout(timer);
      timer = setTimeout(() => end.abort(this.silence()), this.patience(question.kind));
    };
    setTimer();
    try {
      if (!(await this.hasLoaded(connection, given))) throw new NoExtension(NOT_LOADED);
      setTimer();
      const link = connection as unknown as KernelConnection;
      const asked = askOverControl(link, PANEL, { ...question, n: this.count }, end.signal);
      // it may still reject after the timeout
      asked.catch(() => undefined);
      const reply = await Promise.race([asked.catch((error: unknown) => this.refused(error, end.signal)), given]);
      const read = this.read(reply);
      if (question.kind === "kernel") this.sentChoice(kernel, question.kept);
      if (read.kind === "kernel-answer" && read.kept) this.sentChoice(kernel, read.kept);
      return read;
    } finally {
      clearTimeout(timer);
      this.waiting.delete(end);
    }
  }

  saveChoice(kept: KeptChoice): void {
    this.around.context.model?.setMetadata(CHOICE_KEY, kept);
  }

  readonly insertLoad = (): void => {
    const model = this.around.context.model;
    if (!model) return;
    const { cells } = model.sharedModel;
    const found = cells.findIndex((cell) => cell.cell_type === "code" && cell.getSource().trim() === LOAD);
    // the cell is there if the button was pressed twice, or if it was inserted before a restart of the kernel
    if (found < 0) model.sharedModel.insertCell(0, { cell_type: "code", source: LOAD, metadata: { trusted: true } });
    this.around.showCell(Math.max(found, 0));
  };

  readonly startKernel = async (): Promise<void> => {
    const { session } = this.around;
    const { state, connection } = this.kernelOf;
    if (state === "disconnected" && connection) await connection.reconnect();
    else if (state === "dead" && session.session?.kernel) await session.restartKernel();
    else if (await session.startKernel()) await this.around.selectKernel();
  };

  /** The panel is visible again: reports the changes that it missed. */
  looked(): void {
    if (!this.isLate) return;
    this.isLate = false;
    for (const callback of [...this.callbacks]) callback();
  }

  /**
   * Sends the notebook's choice to the kernel, unless the kernel has it.
   *
   * If several notebooks share the kernel, only the one in front replaces a choice. A notebook without a choice is
   * never the first to send: its kernel may not use sgpu-magic.
   */
  async tellKept(): Promise<void> {
    const { savedChoice, kernel, kernelState } = this;
    if (this.signal.aborted || kernel === "" || (kernelState !== "idle" && kernelState !== "busy")) return;
    const { choices } = this.around;
    const written = JSON.stringify(savedChoice);
    if (choices.knows(kernel, written) || this.telling === written) return;
    if (choices.knowsAny(kernel) ? !this.around.isFront() : savedChoice === null) return;
    this.telling = written;
    try {
      const reply = await this.ask({ kind: "kernel", kept: savedChoice });
      if (reply.kind === "kernel-answer" && reply.kept && JSON.stringify(reply.kept) !== written) this.saveChoice(reply.kept);
    } catch {
      // sgpu-magic is not loaded, or the kernel is blocked: retried after the next cell
    } finally {
      this.telling = null;
    }
  }

  // ---------------------------------------------------------------- events

  private opened(): void {
    const { model } = this.around.context;
    if (this.signal.aborted || !model) return;
    const metadataChanged = (_: unknown, change: { readonly key: string }): void => {
      if (change.key === CHOICE_KEY) this.changed();
    };
    model.metadataChanged.connect(metadataChanged);
    this.signal.addEventListener("abort", () => model.metadataChanged.disconnect(metadataChanged), { once: true });
    this.changed();
  }

  private changed(tells = true): void {
    if (this.signal.aborted) return;
    if (this.around.isLooked()) for (const callback of [...this.callbacks]) callback();
    // a hidden panel sends no requests to kernels
    else this.isLate = true;
    if (tells) void this.tellKept();
  }

  private replaced(isOtherKernel: boolean): void {
    this.isKnown = false;
    this.looking = null;
    // another kernel may be known as loaded from before this notebook used it
    if (!isOtherKernel) this.around.loaded.forget(this.kernelOf.kernelId);
    this.around.choices.forget(this.kernelOf.kernelId);
    this.drop(RESTARTED);
  }

  private drop(reason: string): void {
    for (const end of [...this.waiting]) end.abort(new Error(reason));
  }

  // ---------------------------------------------------------------- requests

  private setLoaded(kernel: string, isLoaded: boolean): void {
    const { loaded } = this.around;
    if (isLoaded) loaded.add(kernel);
    else loaded.forget(kernel);
    this.looking = Promise.resolve(isLoaded);
    if (!isLoaded) this.isKnown = false;
  }

  /**
   * Whether the kernel has loaded sgpu-magic. Requested once per kernel process, on the main shell, where every kernel
   * replies: the kernel announces later changes.
   *
   * @param given: Rejects when the request has timed out; a busy kernel replies after its cell.
   */
  private async hasLoaded(connection: Kernel.IKernelConnection, given: Promise<never>): Promise<boolean> {
    const kernel = this.kernelOf.kernelId;
    if (this.around.loaded.has(kernel)) return true;
    const looking = (this.looking ??= this.look(connection));
    let isLate = false;
    void looking.then((isLoaded) => {
      if (this.looking !== looking || !isLoaded) return;
      this.around.loaded.add(kernel);
      if (isLate) this.changed();
    });
    try {
      return await Promise.race([looking, given]);
    } catch (error) {
      isLate = true;
      throw error;
    }
  }

  private async look(connection: Kernel.IKernelConnection): Promise<boolean> {
    try {
      const content = (await connection.requestKernelInfo())?.content;
      return content !== undefined && "banner" in content && content.banner.includes(IN_BANNER);
    } catch {
      // the connection was closed: the next request tries again
      this.looking = null;
      return false;
    }
  }

  private patience(kind: KernelQuestionBody["kind"]): number {
    if (!this.isKnown) return PATIENCE_MS;
    return kind === "kernel" ? KNOWN_PATIENCE_MS : SLOW_PATIENCE_MS;
  }

  private silence(): Error {
    // a busy kernel can't report whether it has loaded sgpu-magic
    const isUnknown = this.kernelState === "busy" && !this.around.loaded.has(this.kernel);
    return this.isKnown || isUnknown ? new Error(SILENT) : new NoExtension(NOT_LOADED);
  }

  /** Throws the panel's error for a request that the kernel does not know, or whose connection was closed. */
  private refused(error: unknown, signal: AbortSignal): never {
    if (signal.aborted) throw signal.reason as Error;
    if (this.isKnown || this.kernelState === "dead") throw new Error(SILENT, { cause: error });
    throw new NoExtension(NOT_LOADED);
  }

  private read(reply: unknown): KernelReply {
    // from a version with views of runs but no panel
    if ((reply as { readonly kind?: unknown } | null)?.kind === "refusal") throw new NoExtension(OTHER_VERSION);
    const read = readReply(reply);
    this.isKnown = true;
    return read;
  }

  private sentChoice(kernel: string, kept: KeptChoice | null): void {
    if (kernel === this.kernelOf.kernelId) this.around.choices.tell(kernel, JSON.stringify(kept));
  }
}
