import type { Answer, Snapshot, FeedUpdate } from "../run_view/messages";
import type { QuestionBody, LinkState, Transport } from "../run_view/transport";
import { NoAnswer } from "../shared/widget_requests";
import type { RunFeed } from "./run_feed";
import type { RunServer } from "./run_server";

/** Requests go to the Jupyter server, which reads the run's directory: the kernel's state does not matter. */
export class ServerTransport implements Transport {
  readonly kind = "server";
  private readonly ending = new AbortController();
  private readonly unlisten: () => void;
  private updated: (update: FeedUpdate) => void = () => undefined;
  private drawn: (snapshot: Snapshot) => void = () => undefined;
  private linked: (state: LinkState) => void = () => undefined;
  private count = 0;

  constructor(
    private readonly server: RunServer,
    private readonly feed: RunFeed,
  ) {
    this.unlisten = feed.listen({
      onUpdate: (update) => this.updated(update),
      drawn: (snapshot) => this.drawn(snapshot),
      linked: (link) => this.linked(link),
    });
    feed.signal.addEventListener("abort", () => this.dispose(), { signal: this.ending.signal });
  }

  async ask(question: QuestionBody): Promise<Answer> {
    // read before the request: updates that arrive before the reply are applied on top of it
    const { seq } = this.feed;
    this.count += 1;
    let answer: Answer;
    try {
      answer = await this.server.ask(this.feed.run, { ...question, n: this.count }, this.ending.signal);
    } catch (error) {
      if (error instanceof NoAnswer) throw error;
      throw new NoAnswer(`the Jupyter server does not answer: ${error instanceof Error ? error.message : String(error)}`);
    }
    // each feed has its own numbering
    return answer.kind === "hello" ? { ...answer, seq } : answer;
  }

  onUpdate(callback: (update: FeedUpdate) => void): void {
    this.updated = callback;
  }

  onSnapshot(callback: (snapshot: Snapshot) => void): void {
    this.drawn = callback;
    if (this.feed.snapshot) callback(this.feed.snapshot);
  }

  onLink(callback: (state: LinkState) => void): void {
    this.linked = callback;
    callback(this.feed.link);
  }

  dispose(): void {
    this.unlisten();
    this.ending.abort();
  }
}
