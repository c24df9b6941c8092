import type { Activity } from "../shared/activity";
import { Ticker } from "../shared/ticker";
import { freeDevices, resolveChoice } from "./form";
import type { NotebookLink, PanelHost, PoolLinkState } from "./host";
import type { Choice, RunRow, PanelUpdate } from "./messages";
import { NotebookModel } from "./notebook_model";
import { PoolModel } from "./pool_model";

const LOCAL = "local";

/** The panel's state and actions; the components render it. */
export class PanelModel {
  /** Prefix of its elements' ids. */
  readonly id = `sgpu-${Math.random().toString(36).slice(2, 10)}`;
  readonly pool: PoolModel;
  notebook: NotebookModel | null = null;
  link: PoolLinkState = { kind: "connecting", text: "" };
  /** Runs that are being cancelled by a button of this panel. */
  readonly cancelling = new Set<string>();
  /** Whether the pool is being started by a button of this panel. */
  isStarting = false;
  /** Ticks once a second, by the server's clock. */
  readonly ticker: Ticker;

  private readonly drafts = new Map<string, Choice>();
  private readonly listeners = new Set<() => void>();
  private lastSession = "";
  /** A pool that was chosen before the kernel had answered. */
  private pickedPool: string | null = null;
  private isWatching = false;
  private dirty = false;
  private frame: number | undefined;

  constructor(
    readonly host: PanelHost,
    private readonly activity: Activity,
    private readonly signal: AbortSignal,
  ) {
    this.pool = new PoolModel(host.firstPool);
    this.ticker = new Ticker(() => this.pool.now_s, activity, signal);
    const unsubscribe = host.onChange(() => this.onHostChange());
    host.pools.onUpdate((update) => this.onUpdate(update));
    host.pools.onLink((link) => {
      this.link = link;
      this.requestRedraw();
    });
    activity.onChange(() => this.updateWatching());
    signal.addEventListener(
      "abort",
      () => {
        unsubscribe();
        this.notebook?.close();
        this.listeners.clear();
        if (this.frame !== undefined) cancelAnimationFrame(this.frame);
        if (this.isWatching) host.pools.order({ kind: "rest" });
      },
      { once: true },
    );
    this.setNotebook(host.notebook);
    this.updateWatching();
  }

  /** The active notebook's session as the pool reports it, even while the kernel is busy or dead. */
  get session(): RunRow | null {
    const notebook = this.notebook;
    return notebook ? this.pool.sessionOf(notebook.link.kernel, notebook.currentSession) : null;
  }

  /** The active notebook's last session, if it has ended and no other one has replaced it. */
  get endedSession(): RunRow | null {
    const notebook = this.notebook;
    return notebook && !this.session ? this.pool.endedSessionOf(notebook.link.kernel) : null;
  }

  /** Whether a session like the ended one can be connected, by the kernel or by a cell that loads the extension. */
  get canReconnect(): boolean {
    const { notebook } = this;
    if (!notebook || notebook.isKernelUnavailable || !this.endedSession || notebook.needsConfirmation) return false;
    if (notebook.kernel) return true;
    return notebook.kernelProblem?.kind === "no-extension" && this.host.connectRun !== undefined;
  }

  /** The pool that is shown. */
  get poolName(): string {
    return this.pool.snapshot?.pool ?? this.pool.watched;
  }

  /** Calls back after changes, at most once a frame, and only while the panel is visible. */
  subscribe(callback: () => void): () => void {
    this.listeners.add(callback);
    return () => this.listeners.delete(callback);
  }

  /** Shows another pool, and selects it in the notebook's form, now or once its kernel has answered. */
  choosePool(pool: string): void {
    const { notebook } = this;
    if (notebook?.kernel) notebook.choose({ ...notebook.form, pool });
    else this.pickedPool = pool;
    this.watch(pool);
    this.requestRedraw();
  }

  /** Runs the action of the button below a pool's sentence. */
  runRemedy(): void {
    const { snapshot } = this.pool;
    if (snapshot?.remedy === "start") {
      this.isStarting = true;
      this.host.pools.order({ kind: "start-pool", pool: snapshot.pool });
    } else {
      this.host.pools.order({ kind: "watch", pool: this.pool.watched });
    }
    this.requestRedraw();
  }

  cancel(run: RunRow): void {
    this.cancelling.add(run.run_id);
    this.host.pools.order({ kind: "cancel-run", run_id: run.run_id, pool: this.pool.poolOf(run.run_id) });
    this.requestRedraw();
  }

  /** Ends the notebook's session through its kernel, or through the pool if the kernel can't. */
  async disconnect(): Promise<void> {
    const { notebook, session } = this;
    const named = notebook?.kernel?.sessions.find(({ run_id }) => run_id === session?.run_id);
    if (notebook && (await notebook.disconnect(named?.name ?? ""))) return;
    if (session) this.cancel(session);
  }

  /** Connects a session with the devices of the ended one. */
  reconnect(): void {
    const { notebook, endedSession } = this;
    if (!notebook || !endedSession || !this.canReconnect) return;
    if (notebook.kernel) void notebook.reconnect(endedSession.ranks, endedSession.device_type);
    else this.host.connectRun?.(endedSession);
  }

  /** Whether a run is this user's: any run of the local pool, or a run of the active kernel's user. */
  isMine(run: RunRow): boolean {
    if (this.pool.poolOf(run.run_id) === LOCAL) return true;
    const kernel = this.notebook?.link.kernel ?? "";
    return kernel !== "" && this.pool.allRuns.some((each) => each.kernel === kernel && each.user === run.user);
  }

  dismissNotice(): void {
    this.pool.result = null;
    this.requestRedraw();
  }

  requestRedraw(): void {
    this.dirty = true;
    if (this.frame !== undefined || !this.activity.active || this.signal.aborted) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = undefined;
      this.flush();
    });
  }

  private onUpdate(update: PanelUpdate): void {
    this.pool.apply(update);
    if (update.kind === "command-result") {
      this.isStarting = false;
      if (!update.ok) this.cancelling.clear();
    } else if (update.kind === "pool") {
      if (update.snapshot.state === "up") this.isStarting = false;
      this.followPool();
      this.notebook?.planIfStale();
    } else if (update.kind === "pools") {
      this.followPool();
    } else {
      for (const id of this.cancelling) if (this.pool.run(id)?.final !== false) this.cancelling.delete(id);
      this.onRunsChange();
    }
    this.requestRedraw();
  }

  /** Asks the kernel if the session has changed, because it knows more about its session than the pool. */
  private onRunsChange(): void {
    const { session } = this;
    const current = session ? `${session.run_id} ${session.state} ${session.reason}` : "";
    if (current === this.lastSession) return;
    this.lastSession = current;
    // the last message was about the session that has ended
    if (!session) this.notebook?.dismissNotice();
    this.notebook?.askKernel();
    this.notebook?.planSoon();
  }

  private onHostChange(): void {
    if (this.host.notebook !== (this.notebook?.link ?? null)) this.setNotebook(this.host.notebook);
    this.requestRedraw();
  }

  private setNotebook(link: NotebookLink | null): void {
    this.notebook?.close();
    this.notebook = null;
    this.pickedPool = null;
    if (link) {
      const notebook = new NotebookModel(
        link,
        (choice) => resolveChoice(choice, this.pool.snapshot),
        (choice) => freeDevices(choice, this.pool.snapshot),
        () => this.onNotebookChange(),
      );
      notebook.draft = this.drafts.get(draftKey(link)) ?? null;
      this.notebook = notebook;
    }
    const { session } = this;
    this.lastSession = session ? `${session.run_id} ${session.state} ${session.reason}` : "";
    this.followPool();
  }

  private onNotebookChange(): void {
    const { notebook } = this;
    if (notebook) {
      const key = draftKey(notebook.link);
      if (notebook.draft) this.drafts.set(key, notebook.draft);
      else this.drafts.delete(key);
    }
    this.followPool();
    this.requestRedraw();
  }

  /** Shows the pool that the active notebook asks for, or that its next run would use. */
  private followPool(): void {
    const kernel = this.notebook?.kernel;
    if (!kernel || !this.notebook) {
      const instead = this.pool.watched === "" ? this.pool.insteadOf(this.poolName) : "";
      if (instead !== "") this.watch(instead);
      return;
    }
    const picked = this.pickedPool;
    this.pickedPool = null;
    if (picked !== null && !this.notebook.needsConfirmation) this.notebook.choose({ ...this.notebook.form, pool: picked });
    const wanted = this.notebook.form.pool || this.pool.insteadOf(kernel.pool) || kernel.pool;
    if (wanted !== "" && wanted !== this.poolName && this.poolName !== "") this.watch(wanted);
  }

  private watch(pool: string): void {
    if (pool === this.pool.watched) return;
    this.pool.switchTo(pool);
    this.isStarting = false;
    this.cancelling.clear();
    if (this.isWatching) this.host.pools.order({ kind: "watch", pool });
  }

  /** Watches the pool only while the panel is visible. */
  private updateWatching(): void {
    const { active } = this.activity;
    if (active && !this.isWatching) this.host.pools.order({ kind: "watch", pool: this.pool.watched });
    else if (!active && this.isWatching) this.host.pools.order({ kind: "rest" });
    this.isWatching = active;
    if (active) this.flush();
  }

  private flush(): void {
    if (!this.dirty || !this.activity.active || this.signal.aborted) return;
    this.dirty = false;
    for (const callback of [...this.listeners]) callback();
  }
}

function draftKey(link: NotebookLink): string {
  return `${link.kernel} ${link.name}`;
}
