/** What a panel needs of the place where it is drawn: JupyterLab's sidebar, or a widget in a notebook. */
import type { KernelQuestion, KernelReply, KeptChoice, PanelOrder, RunRow, Told } from "./messages";

type WithoutNumber<Q> = Q extends unknown ? Omit<Q, "n"> : never;

/** A question to the kernel before it is numbered. */
export type KernelAsk = WithoutNumber<KernelQuestion>;

/**
 * The way to pools.
 *
 * `absent`: the server has no sgpu-magic; `refused`: it has, and says why it does not serve this page.
 */
export interface PoolLinkState {
  readonly kind: "connecting" | "open" | "away" | "absent" | "refused";
  /** A sentence, "" while it is open. */
  readonly text: string;
}

/** Tells about a pool, and takes orders. Callbacks are called until the panel's signal aborts. */
export interface PoolLink {
  order(order: PanelOrder): void;
  onTold(callback: (told: Told) => void): void;
  onLink(callback: (state: PoolLinkState) => void): void;
  /** Tries again at once. */
  retry(): void;
}

export type KernelState = "none" | "starting" | "idle" | "busy" | "restarting" | "dead" | "disconnected";

/** The kernel has not loaded sgpu-magic, or has none of this version; the text says which. */
export class NoExtension extends Error {}

/** One notebook and its kernel. */
export interface NotebookLink {
  /** File name without folders. */
  readonly name: string;
  /** The Jupyter server's id of its kernel, "" without one. */
  readonly kernel: string;
  readonly kernelState: KernelState;
  /** What its metadata says; null for nothing, or for what can't be read. */
  readonly kept: KeptChoice | null;
  /**
   * Called when any of these has changed, when a cell has ended, and when the kernel has another incarnation.
   * Returns how to stop that.
   */
  onChange(callback: () => void): () => void;
  /**
   * Asks its kernel, also while a cell runs.
   *
   * @throws NoExtension: It does not know the question.
   * @throws Error: It can't be asked now; the text is a sentence.
   */
  ask(question: KernelAsk): Promise<KernelReply>;
  /** Writes its metadata. */
  keep(kept: KeptChoice): void;
  /** Puts `%load_ext sgpu_magic` into a new first cell and shows it; nothing runs. Absent where it can't be done. */
  insertLoad?: (() => void) | undefined;
  /** Starts a kernel, where the front end can. */
  startKernel?: (() => Promise<void>) | undefined;
}

export interface PanelSettings {
  readonly showPrices: boolean;
}

/** Translates a sentence; `%1` and so on stand for the arguments. */
export type Translate = (text: string, ...values: readonly (string | number)[]) => string;

export interface PanelHost {
  readonly pools: PoolLink;
  readonly settings: PanelSettings;
  /** The pool that is looked at as long as no notebook asks for another one, "" the server's default. */
  readonly firstPool?: string | undefined;
  readonly translate: Translate;
  /** The notebook in front, null when there is none. */
  readonly notebook: NotebookLink | null;
  /** Called when another notebook is in front, or the settings have changed. Returns how to stop that. */
  onChange(callback: () => void): () => void;
  /** Makes a notebook and shows it. Absent where it can't be done. */
  newNotebook?: (() => void) | undefined;
  /** Opens a run's log, stacks and devices in a tab of its own. Absent where it can't be done. */
  openRun?: ((run: RunRow) => void) | undefined;
  /** Puts a cell with `%sgpu_attach` into the notebook in front and runs it. */
  attachRun?: ((run: RunRow) => void) | undefined;
  /** Puts a cell with `%sgpu_replay` into the notebook in front and runs it. */
  replayRun?: ((run: RunRow) => void) | undefined;
  /** Puts a cell with `%sgpu_connect` and a session's devices into the notebook in front and runs it. */
  connectRun?: ((session: RunRow) => void) | undefined;
  /** What the panel remembers over a reload: filter, sections that are closed. */
  readonly memory: { get(key: string): string | null; set(key: string, value: string): void };
}
