import type { Answer, Question, Snapshot, FeedUpdate } from "./messages";

type WithoutNumber<Q> = Q extends unknown ? Omit<Q, "n"> : never;

/** A question without the number that its transport adds. */
export type QuestionBody = WithoutNumber<Question>;

/** The channel of questions: the kernel's comm subshell, its control channel, its main shell, or the server. */
export type TransportKind = "subshell" | "control" | "shell" | "server";

/** State of a view's connection to the source of its updates. */
export interface LinkState {
  /** Questions are waiting because the kernel is busy. */
  readonly busy: boolean;
  /** The link is down and expected to recover. */
  readonly away: boolean;
  /** Why the link has ended for good, "" if it has not. */
  readonly ended: string;
}

/**
 * Connects a view to the source of its updates.
 *
 * Callbacks are called until `dispose`. A transport has one listener of each kind: the view that it was made for.
 */
export interface Transport {
  readonly kind: TransportKind;
  /**
   * Sends a question and resolves with its answer, which may be a refusal.
   *
   * @throws NoAnswer: There will be no answer.
   */
  ask(question: QuestionBody): Promise<Answer>;
  onUpdate(callback: (update: FeedUpdate) => void): void;
  onSnapshot(callback: (snapshot: Snapshot) => void): void;
  onLink?(callback: (state: LinkState) => void): void;
  /** Interrupts the kernel, where the front end can. */
  interrupt?: (() => Promise<void>) | undefined;
  dispose(): void;
}
