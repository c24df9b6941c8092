import type { Answer, Snapshot, FeedUpdate } from "../run_view/messages";
import type { QuestionBody, LinkState, Transport } from "../run_view/transport";
import { NoAnswer } from "../shared/widget_requests";
import type { RunFeed } from "./run_feed";
import type { RunServer } from "./run_server";

/** Sends questions to the Jupyter server, which reads the run's directory, so they are answered without the kernel. */
export class ServerTransport implements Transport {
  readonly kind = "server";
  private readonly controller = new AbortController();
  private readonly removeListener: () => void;
  private updateCallback: (update: FeedUpdate) => void = () => undefined;
  private snapshotCallback: (snapshot: Snapshot) => void = () => undefined;
  private linkCallback: (state: LinkState) => void = () => undefined;
  private count = 0;

  constructor(
    private readonly server: RunServer,
    private readonly feed: RunFeed,
  ) {
    this.removeListener = feed.addListener({
      onUpdate: (update) => this.updateCallback(update),
      onSnapshot: (snapshot) => this.snapshotCallback(snapshot),
      onLinkChange: (link) => this.linkCallback(link),
    });
    feed.signal.addEventListener("abort", () => this.dispose(), { signal: this.controller.signal });
  }

  async ask(question: QuestionBody): Promise<Answer> {
    // read before the request, so that updates that arrive before the reply are applied on top of it
    const { seq } = this.feed;
    this.count += 1;
    let answer: Answer;
    try {
      answer = await this.server.ask(this.feed.run, { ...question, n: this.count }, this.controller.signal);
    } catch (error) {
      if (error instanceof NoAnswer) throw error;
      throw new NoAnswer(`the Jupyter server does not answer: ${error instanceof Error ? error.message : String(error)}`);
    }
    // each feed has its own numbering
    return answer.kind === "hello" ? { ...answer, seq } : answer;
  }

  onUpdate(callback: (update: FeedUpdate) => void): void {
    this.updateCallback = callback;
  }

  onSnapshot(callback: (snapshot: Snapshot) => void): void {
    this.snapshotCallback = callback;
    if (this.feed.snapshot) callback(this.feed.snapshot);
  }

  onLink(callback: (state: LinkState) => void): void {
    this.linkCallback = callback;
    callback(this.feed.link);
  }

  dispose(): void {
    this.removeListener();
    this.controller.abort();
  }
}
