import type { MlflowAddress, PageFiles, RunPage } from "./records";

/** Requests to the server for a run's page. Methods throw if the server refuses or does not answer. */
export interface PageServer {
  page(run: string, signal: AbortSignal): Promise<RunPage>;
  files(run: string, signal: AbortSignal): Promise<PageFiles>;
  /** Starts `mlflow ui` for the run's store unless it is running; the address has no URL while it starts. */
  mlflowAddress(run: string, signal: AbortSignal): Promise<MlflowAddress>;
  /** Returns the URL of one of the run's files. */
  fileUrl(run: string, name: string): string;
}

const PENDING_EVERY_MS = 2_000;
/** An MLflow run may be created this many requests after the run's end. */
const MAX_PENDING = 30;

/** The last page of a run that the server sent. The page is requested again when the run's state changes. */
export class RunPageModel {
  page: RunPage | null = null;
  files: PageFiles | null = null;
  /** Why the page or the files can't be shown, "" if they can. */
  error = "";
  private received_ms = 0;
  private state = "";
  private isLoading = false;
  private isStale = false;
  private pending = 0;
  private readonly listeners = new Set<() => void>();

  constructor(
    readonly run: string,
    private readonly server: PageServer,
    private readonly signal: AbortSignal,
  ) {}

  subscribe(callback: () => void): () => void {
    this.listeners.add(callback);
    return () => this.listeners.delete(callback);
  }

  /** Seconds since the page was received. */
  get age_s(): number {
    return (performance.now() - this.received_ms) / 1000;
  }

  fileUrl(name: string): string {
    return this.server.fileUrl(this.run, name);
  }

  /** Starts `mlflow ui` unless it is running, and returns its address once it answers. */
  async mlflowAddress(): Promise<MlflowAddress> {
    for (;;) {
      // the server replies after some seconds at most
      const address = await this.server.mlflowAddress(this.run, this.signal);
      if (address.url !== "") return address;
    }
  }

  onSnapshot(snapshot: { readonly state: string }): void {
    if (snapshot.state === this.state) return;
    this.state = snapshot.state;
    void this.refresh();
  }

  onFinal(): void {
    void this.refresh();
  }

  /** Requests the page and the files. A call during a request is followed by another request. */
  async refresh(): Promise<void> {
    if (this.isLoading) {
      this.isStale = true;
      return;
    }
    this.isLoading = true;
    do {
      this.isStale = false;
      await this.load();
    } while (this.isStale && !this.signal.aborted);
    this.isLoading = false;
  }

  /** Requests the page again while its MLflow run does not exist yet. */
  private awaitMlflow(): void {
    if (this.page?.mlflow?.run_id !== "" || this.pending === MAX_PENDING) return;
    this.pending += 1;
    setTimeout(() => {
      if (!this.signal.aborted) void this.refresh();
    }, PENDING_EVERY_MS);
  }

  private async load(): Promise<void> {
    try {
      const [page, files] = await Promise.all([
        this.server.page(this.run, this.signal),
        this.server.files(this.run, this.signal),
      ]);
      [this.page, this.files, this.error] = [page, files, ""];
      this.received_ms = performance.now();
    } catch (error) {
      this.error = error instanceof Error ? error.message : String(error);
    }
    if (this.signal.aborted) return;
    this.awaitMlflow();
    for (const callback of [...this.listeners]) callback();
  }
}
