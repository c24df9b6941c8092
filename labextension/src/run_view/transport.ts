import type { Answer, Question, Snapshot, Told } from "./messages";

type WithoutNumber<Q> = Q extends unknown ? Omit<Q, "n"> : never;

/** A question before its transport numbers it. */
export type Ask = WithoutNumber<Question>;

/** How questions travel: on the kernel's comm subshell, its control channel, its main shell, or through the server. */
export type TransportKind = "subshell" | "control" | "shell" | "server";

/** What a view learns about its link, besides messages. */
export interface LinkState {
  /** Questions are waiting because the kernel is busy. */
  readonly busy: boolean;
  /** Nothing comes through at the moment; it is expected to come back. */
  readonly away: boolean;
  /** Why nothing will come any more, "" while there is hope. */
  readonly ended: string;
}

/**
 * The way between a view and what feeds it.
 *
 * Callbacks are called until `dispose`. A transport has one listener of each sort: the view that it was made for.
 */
export interface Transport {
  readonly kind: TransportKind;
  /**
   * Asks, and resolves with the answer whenever it comes, a refusal included.
   *
   * @throws NoAnswer: None will come.
   */
  ask(question: Ask): Promise<Answer>;
  onTold(callback: (told: Told) => void): void;
  onSnapshot(callback: (snapshot: Snapshot) => void): void;
  onLink?(callback: (state: LinkState) => void): void;
  /** Interrupts the kernel, where the front end can. */
  interrupt?: (() => Promise<void>) | undefined;
  dispose(): void;
}
