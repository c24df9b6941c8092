import type { Answer, LineRow, NewLines, RankCard, Snapshot, FeedUpdate } from "../src/run_view/messages";
import { VERSION } from "../src/run_view/messages";
import { NoAnswer } from "../src/shared/widget_requests";
import type { QuestionBody, LinkState, Transport, TransportKind } from "../src/run_view/transport";

export function card(rank: number, change: Partial<RankCard> = {}): RankCard {
  return {
    rank,
    state: "running",
    tone: "busy",
    label: "A10",
    last: `epoch 7 of rank ${rank}`,
    bar: { fraction: 0.62, text: "epoch 7/10 · 62 %" },
    use: "94 % · 18.2 GB",
    details: ["power 231 of 300 W"],
    curves: [{ name: "GPU", unit: "%", values: [90, null, 94], began_s: 0, step_s: 1, top: 100 }],
    idle: "",
    host: "",
    ...change,
  };
}

export function snapshot(change: Partial<Snapshot> = {}): Snapshot {
  return {
    version: VERSION,
    seq: 1,
    run_id: "7f3a00",
    short_id: "7f3a",
    name: "train_digits",
    mark: "",
    state: "running",
    tone: "busy",
    final: false,
    devices: "4 ranks · cpu, gloo",
    pool: "local",
    host: "",
    attempt: "",
    elapsed_s: 134,
    starting_s: 3.2,
    ticking: true,
    cost: null,
    meta: [],
    preparing: [],
    bar: null,
    ranks: [0, 1, 2, 3].map((rank) => card(rank)),
    metrics: [],
    metrics_text: "",
    more_metrics: "",
    only: [],
    idle: [],
    warnings: [],
    notes: [],
    stall: [],
    failure: null,
    others: [],
    footer: ["shipped model · 45.1 MB"],
    tracked: null,
    lines: [0, 0, 0, 0],
    can_cancel: true,
    own_sessions: [],
    stop: "Cancel",
    attach: "%sgpu_attach 7f3a",
    ...change,
  };
}

/** Returns line `at` of a run whose four ranks print in turn. */
export function line(at: number, text = `line ${at}`): LineRow {
  return [at % 4, Math.floor(at / 4), text, false];
}

export function newLines(seq: number, first: number, rows: NewLines["rows"], ranks: readonly number[] = []): NewLines {
  return { kind: "lines", seq, first, rows, ranks };
}

type Responder = (question: QuestionBody) => Answer | Promise<Answer>;

/** A transport that the test controls. */
export class TestTransport implements Transport {
  readonly questions: QuestionBody[] = [];
  disposed = false;
  interrupted = 0;
  interrupt?: () => Promise<void>;
  sendUpdate: (updates: FeedUpdate) => void = () => undefined;
  sendSnapshot: (snapshot: Snapshot) => void = () => undefined;
  setLink: (state: LinkState) => void = () => undefined;

  constructor(
    private readonly respond: Responder,
    readonly kind: TransportKind = "subshell",
  ) {}

  async ask(question: QuestionBody): Promise<Answer> {
    this.questions.push(question);
    return this.respond(question);
  }

  onUpdate(callback: (updates: FeedUpdate) => void): void {
    this.sendUpdate = callback;
  }

  onSnapshot(callback: (snapshot: Snapshot) => void): void {
    this.sendSnapshot = callback;
  }

  onLink(callback: (state: LinkState) => void): void {
    this.setLink = callback;
  }

  dispose(): void {
    this.disposed = true;
  }
}

/** Answers like a kernel with `total` lines of four ranks. */
export function respondingWith(total: number, change: Partial<Snapshot> = {}, text?: (at: number) => string): Responder {
  const row = (at: number): LineRow => line(at, text?.(at));
  const ranks = [0, 1, 2, 3].map((rank) => Math.ceil((total - rank) / 4));
  return (question) => {
    switch (question.kind) {
      case "hello":
        return { kind: "hello", n: 0, snapshot: snapshot({ lines: ranks, ...change }), seq: 0 };
      case "lines": {
        const all = question.rank === null ? total : (ranks[question.rank] ?? 0);
        const count = Math.max(0, Math.min(question.count, all - question.first));
        const numbers = Array.from({ length: count }, (_, index) => question.first + index);
        const rank = question.rank;
        return {
          kind: "lines-answer",
          n: 0,
          first: question.first,
          rows: numbers.map((number) => row(rank === null ? number : number * 4 + rank)),
          total: all,
        };
      }
      case "find": {
        const found = Array.from({ length: total }, (_, at) => at).filter((at) => row(at)[2].includes(question.text));
        return { kind: "find-answer", n: 0, matches: found.slice(-1000), total: found.length };
      }
      case "log":
        return { kind: "log-answer", n: 0, text: `piece at ${question.offset}\n`, next_offset: null };
      case "cancel":
        return { kind: "text", n: 0, lines: ["cancelling run 7f3a"] };
      case "end-session":
        return { kind: "text", n: 0, lines: [`session ${question.session} is being ended`] };
      case "stacks":
        return { kind: "text", n: 0, lines: ["rank 1   is in load_batch"] };
    }
  };
}

export function never(): Promise<never> {
  return new Promise(() => undefined);
}

export function refusing(text: string): Promise<never> {
  return Promise.reject(new NoAnswer(text));
}
