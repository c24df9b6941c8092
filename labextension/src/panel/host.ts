/** What a panel needs from its host: JupyterLab's sidebar, or a widget in a notebook. */
import type { KernelQuestion, KernelReply, KeptChoice, PanelOrder, RunRow, PanelUpdate } from "./messages";

type WithoutNumber<Q> = Q extends unknown ? Omit<Q, "n"> : never;

/** A question to the kernel without its number. */
export type KernelQuestionBody = WithoutNumber<KernelQuestion>;

/**
 * State of the connection to the pools.
 *
 * `absent`: the server has no sgpu-magic; `refused`: it does not serve this page, and `text` says why.
 */
export interface PoolLinkState {
  readonly kind: "connecting" | "open" | "away" | "absent" | "refused";
  /** A sentence, "" while it is open. */
  readonly text: string;
}

/** Delivers updates of a pool, and sends orders to it. Callbacks are called until the panel's signal aborts. */
export interface PoolLink {
  order(order: PanelOrder): void;
  onUpdate(callback: (update: PanelUpdate) => void): void;
  onLink(callback: (state: PoolLinkState) => void): void;
  /** Tries again at once. */
  retry(): void;
}

export type KernelState = "none" | "starting" | "idle" | "busy" | "restarting" | "dead" | "disconnected";

/** The kernel has not loaded sgpu-magic, or has another version; the text says which. */
export class NoExtension extends Error {}

/** One notebook and its kernel. */
export interface NotebookLink {
  /** File name without folders. */
  readonly name: string;
  /** The Jupyter server's id of its kernel, "" without one. */
  readonly kernel: string;
  readonly kernelState: KernelState;
  /** The choice in its metadata; null if there is none or it can't be read. */
  readonly savedChoice: KeptChoice | null;
  /**
   * Calls back when any of these changes, when a cell ends, and when the kernel is restarted or replaced.
   * Returns a function that unsubscribes.
   */
  onChange(callback: () => void): () => void;
  /**
   * Sends a question to its kernel, even while a cell runs.
   *
   * @throws NoExtension: The kernel does not know the question.
   * @throws Error: The kernel can't be asked now; the text is a sentence.
   */
  ask(question: KernelQuestionBody): Promise<KernelReply>;
  /** Writes the choice to its metadata. */
  saveChoice(choice: KeptChoice): void;
  /**
   * Loads the extension: runs the cell that does, which becomes the first one if there is none. Of a cell with other
   * lines only that line is run. Absent if the host can't.
   */
  loadExtension?: (() => void) | undefined;
  /** Starts a kernel. Absent if the host can't. */
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
  /** The pool to show until a notebook asks for another one, "" for the server's default. */
  readonly firstPool?: string | undefined;
  readonly translate: Translate;
  /** The active notebook, null when there is none. */
  readonly notebook: NotebookLink | null;
  /** Calls back when another notebook becomes active or the settings change. Returns a function that unsubscribes. */
  onChange(callback: () => void): () => void;
  /** Creates a notebook and shows it. Absent if the host can't. */
  newNotebook?: (() => void) | undefined;
  /** Opens a run's log, stacks and devices in a separate tab. Absent if the host can't. */
  openRun?: ((run: RunRow) => void) | undefined;
  /** Opens a tab that compares two runs. Absent if the host can't. */
  compareRuns?: ((first: RunRow, second: RunRow) => void) | undefined;
  /** Inserts a cell with `%sgpu_attach` into the active notebook and runs it. */
  attachRun?: ((run: RunRow) => void) | undefined;
  /** Inserts a cell with `%sgpu_replay` into the active notebook and runs it. */
  replayRun?: ((run: RunRow) => void) | undefined;
  /** Inserts a cell with `%sgpu_connect` and a session's devices into the active notebook and runs it. */
  connectRun?: ((session: RunRow) => void) | undefined;
  /** Stores the panel's filter and collapsed sections, across page reloads if the host can. */
  readonly storage: { get(key: string): string | null; set(key: string, value: string): void };
}
