/** The state of a run's live view, saved so that the view of the ended run continues at the same position. */
import type { Tab } from "./log_model";
import type { LineRow, Snapshot } from "./messages";

/** A position in a run's view. The view's components read it when they are created, and keep it up to date. */
export interface ViewPosition {
  tab: Tab;
  /** The first line in view; null while the log follows its end. */
  line: number | null;
  /** The text in the find bar; null while it is closed. */
  find: string | null;
  /** Height of the active run's view; 0 if it was never visible. */
  height_px: number;
}

/** A view's position and the content that is visible there, for another view of the same run. */
export interface ViewState {
  readonly position: ViewPosition;
  readonly snapshot: Snapshot;
  /** The lines in view, with their numbers in the position's tab. */
  readonly rows: readonly (readonly [number, LineRow])[];
}

/** The page stores the view states of at most this many runs. */
const MAX_STATES = 64;
// the widget and the extension are separate bundles, which share this map
const KEY = Symbol.for("@sgpu-magic/view-states/1");

type ViewStates = Map<string, () => ViewState | null>;

function viewStates(): ViewStates {
  const page = globalThis as { [KEY]?: ViewStates | undefined };
  page[KEY] ??= new Map<string, () => ViewState | null>();
  return page[KEY];
}

/** Returns the initial position: the end of the log of all ranks. */
export function endOfLog(): ViewPosition {
  return { tab: "all", line: null, find: null, height_px: 0 };
}

/** Registers a function that returns the state of a run's view. The oldest ones are removed. */
export function registerViewState(run: string, read: () => ViewState | null): void {
  const states = viewStates();
  states.delete(run);
  states.set(run, read);
  const [oldest] = states.keys();
  if (states.size > MAX_STATES && oldest !== undefined) states.delete(oldest);
}

/** Returns the state of the view that this page has shown of an active run, null if it has shown none. */
export function findViewState(run: string): ViewState | null {
  return viewStates().get(run)?.() ?? null;
}
