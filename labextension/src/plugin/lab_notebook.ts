import type { ISessionContext } from "@jupyterlab/apputils";
import type { INotebookModel } from "@jupyterlab/notebook";
import type { Kernel } from "@jupyterlab/services";
import type { ISignal } from "@lumino/signaling";

import type { KernelAsk, KernelState, NotebookLink } from "../panel/host";
import { NoExtension } from "../panel/host";
import { CHOICE_KEY, PANEL, readKept, readReply } from "../panel/messages";
import type { KernelReply, KeptChoice } from "../panel/messages";
import { askOverControl } from "../shared/kernel_link";
import type { KernelConnection } from "../shared/kernel_link";
import { FollowedKernel } from "./followed_kernel";
import type { KeptChoices } from "./kept_choices";
import type { LoadedKernels } from "./loaded_kernels";

/** A kernel that says nothing for so long counts as one without sgpu-magic. */
export const PATIENCE_MS = 2_000;
/** A kernel that is known to have it may be at something that lets nothing else run. */
export const KNOWN_PATIENCE_MS = 10_000;
/** Questions that install, connect and disconnect. */
export const SLOW_PATIENCE_MS = 60_000;

const LOAD = "%load_ext sgpu_magic";
/** What the banner of a kernel has when sgpu-magic is loaded. */
const IN_BANNER = "sgpu-magic";
const NOT_LOADED = "This kernel has not loaded sgpu-magic.";
const OTHER_VERSION = "This kernel has loaded another version of sgpu-magic than this page. Restart the kernel.";
const SILENT = "The kernel does not answer: the code running in it blocks everything else. It is asked again automatically.";
const RESTARTED = "The kernel was restarted.";

/** What is used of a notebook's document. */
export interface Document {
  readonly path: string;
  readonly pathChanged: ISignal<unknown, string>;
  readonly isReady: boolean;
  readonly ready: Promise<void>;
  readonly model: Pick<INotebookModel, "getMetadata" | "setMetadata" | "metadataChanged" | "sharedModel"> | null;
}

/** What a notebook needs of the page around it. */
export interface Surroundings {
  readonly context: Document;
  readonly session: ISessionContext;
  /** What the page's kernels were told. */
  readonly choices: KeptChoices;
  /** The kernels that can be asked. */
  readonly loaded: LoadedKernels;
  /** The panel shows itself to somebody. */
  isLooked(): boolean;
  /** This notebook is the one in front. */
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
  /** Whether the kernel's process has loaded sgpu-magic, as it says itself; null before it was asked that. */
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
        // a cell that begins will have an end
        changed: () => this.changed(this.kernelState !== "busy"),
        cellEnded: () => this.changed(),
        replaced: (isOtherKernel) => this.replaced(isOtherKernel),
        announced: (isLoaded) => {
          this.setLoaded(this.kernelOf.kernelId, isLoaded);
          // most of the extension is loaded after the end of the cell that loads it
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
    // what its metadata say is not known before
    return this.around.context.isReady ? this.kernelOf.state : "starting";
  }

  get kept(): KeptChoice | null {
    return readKept(this.around.context.model?.getMetadata(CHOICE_KEY));
  }

  onChange(callback: () => void): () => void {
    this.callbacks.add(callback);
    return () => this.callbacks.delete(callback);
  }

  async ask(question: KernelAsk): Promise<KernelReply> {
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
      // it may be refused after it was given up
      asked.catch(() => undefined);
      const reply = await Promise.race([asked.catch((error: unknown) => this.refused(error, end.signal)), given]);
      const read = this.read(reply);
      if (question.kind === "kernel") this.told(kernel, question.kept);
      if (read.kind === "kernel-answer" && read.kept) this.told(kernel, read.kept);
      return read;
    } finally {
      clearTimeout(timer);
      this.waiting.delete(end);
    }
  }

  keep(kept: KeptChoice): void {
    this.around.context.model?.setMetadata(CHOICE_KEY, kept);
  }

  readonly insertLoad = (): void => {
    const model = this.around.context.model;
    if (!model) return;
    const { cells } = model.sharedModel;
    const found = cells.findIndex((cell) => cell.cell_type === "code" && cell.getSource().trim() === LOAD);
    // pressed twice, or loaded before the kernel was restarted
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

  /** The panel is looked at again: it is told now what it has missed. */
  looked(): void {
    if (!this.isLate) return;
    this.isLate = false;
    for (const callback of [...this.callbacks]) callback();
  }

  /**
   * Tells the kernel what the notebook asks for, unless it knows.
   *
   * Of several notebooks with one kernel the one in front counts. A notebook that asks for nothing tells nothing: its
   * kernel may never have heard of sgpu-magic.
   */
  async tellKept(): Promise<void> {
    const { kept, kernel, kernelState } = this;
    if (this.signal.aborted || kernel === "" || (kernelState !== "idle" && kernelState !== "busy")) return;
    const { choices } = this.around;
    const written = JSON.stringify(kept);
    if (choices.knows(kernel, written) || this.telling === written) return;
    if (choices.knowsAny(kernel) ? !this.around.isFront() : kept === null) return;
    this.telling = written;
    try {
      const reply = await this.ask({ kind: "kernel", kept });
      if (reply.kind === "kernel-answer" && reply.kept && JSON.stringify(reply.kept) !== written) this.keep(reply.kept);
    } catch {
      // it has not loaded sgpu-magic, or has no time: after the next cell
    } finally {
      this.telling = null;
    }
  }

  // ---------------------------------------------------------------- what happens

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
    // a panel that nobody sees asks no kernel
    else this.isLate = true;
    if (tells) void this.tellKept();
  }

  private replaced(isOtherKernel: boolean): void {
    this.isKnown = false;
    this.looking = null;
    // of another kernel it may be known since before this notebook had it
    if (!isOtherKernel) this.around.loaded.forget(this.kernelOf.kernelId);
    this.around.choices.forget(this.kernelOf.kernelId);
    this.drop(RESTARTED);
  }

  private drop(reason: string): void {
    for (const end of [...this.waiting]) end.abort(new Error(reason));
  }

  // ---------------------------------------------------------------- questions

  private setLoaded(kernel: string, isLoaded: boolean): void {
    const { loaded } = this.around;
    if (isLoaded) loaded.add(kernel);
    else loaded.forget(kernel);
    this.looking = Promise.resolve(isLoaded);
    if (!isLoaded) this.isKnown = false;
  }

  /**
   * Whether the kernel has loaded sgpu-magic. Asked of its main shell, as any kernel answers there, once each process:
   * when that changes, the kernel says so.
   *
   * @param given: Rejects when nobody waits any longer; a kernel that is busy answers after its cell.
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
      // its connection has ended: the next question looks again
      this.looking = null;
      return false;
    }
  }

  private patience(kind: KernelAsk["kind"]): number {
    if (!this.isKnown) return PATIENCE_MS;
    return kind === "kernel" ? KNOWN_PATIENCE_MS : SLOW_PATIENCE_MS;
  }

  private silence(): Error {
    // a kernel in a cell does not say what it has loaded
    const isUnknown = this.kernelState === "busy" && !this.around.loaded.has(this.kernel);
    return this.isKnown || isUnknown ? new Error(SILENT) : new NoExtension(NOT_LOADED);
  }

  /** The kernel knows no such question, or its connection has ended; throws what that means. */
  private refused(error: unknown, signal: AbortSignal): never {
    if (signal.aborted) throw signal.reason as Error;
    if (this.isKnown || this.kernelState === "dead") throw new Error(SILENT, { cause: error });
    throw new NoExtension(NOT_LOADED);
  }

  private read(reply: unknown): KernelReply {
    // of a version that knows runs' views and no panel
    if ((reply as { readonly kind?: unknown } | null)?.kind === "refusal") throw new NoExtension(OTHER_VERSION);
    const read = readReply(reply);
    this.isKnown = true;
    return read;
  }

  private told(kernel: string, kept: KeptChoice | null): void {
    if (kernel === this.kernelOf.kernelId) this.around.choices.tell(kernel, JSON.stringify(kept));
  }
}
