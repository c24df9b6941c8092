import type { PoolLink, PoolLinkState } from "../panel/host";
import { OtherVersion, readUpdate } from "../panel/messages";
import type { PanelOrder, PanelUpdate } from "../panel/messages";
import { PoolModel } from "../panel/pool_model";
import { readOrNull } from "../shared/widget_requests";
import { errorText } from "./run_server";
import type { Request } from "./run_server";

/** Pause after a failure; each further failure doubles it, up to `MAX_PAUSE_MS`. */
export const PAUSE_MS = 500;
const MAX_PAUSE_MS = 8_000;
/** Pause if the server has no sgpu-magic; it may have after a restart. */
export const ABSENT_PAUSE_MS = 60_000;
/** Give up on websockets after this many silent ones: a proxy probably blocks them. */
const MAX_SILENT_SOCKETS = 3;

const PATH = "sgpu/panel";
const OPEN = 1;
const AWAY = "The Jupyter server does not answer.";
const ABSENT = "This Jupyter server has no sgpu-magic.";
const REFUSED = "The Jupyter server denies this page access to pools.";

/** The members of a websocket that the connection uses. */
export type Socket = Pick<WebSocket, "readyState" | "send" | "close" | "onopen" | "onmessage" | "onclose">;

/** Access to the Jupyter server; paths are relative to its base URL. */
export interface PanelServer {
  open(path: string): Socket;
  readonly request: Request;
}

/** Receives updates from the pool. */
export interface PoolListener {
  onUpdate?(update: PanelUpdate): void;
  onLinkChange?(link: PoolLinkState): void;
}

/**
 * The page's only connection to the Jupyter server's pools, shared by the panel and the buttons in notebooks' toolbars.
 *
 * Uses a websocket, reopened when it is lost; polls the server where a proxy blocks websockets. Requests no updates
 * while there is no subscription.
 */
export class PoolConnection {
  /** The state built from all updates. */
  readonly model = new PoolModel();
  link: PoolLinkState = { kind: "connecting", text: "" };
  /** Polling interval where websockets are blocked. */
  pollInterval_ms = 2_000;
  /** The pool to watch until a subscriber names one, "" for the one in sgpu-magic's settings. */
  defaultPool = "";

  private readonly listeners = new Set<PoolListener>();
  /** Each subscriber's pool; null for whichever pool is watched. */
  private readonly subscribers = new Map<object, string | null>();
  private watched: string | null = null;
  private socket: Socket | null = null;
  private isPolling = false;
  private silentSockets = 0;
  private pause_ms = PAUSE_MS;
  private timer: ReturnType<typeof setTimeout> | undefined;
  /** Incremented by every `stop`, so that late results of earlier requests are ignored. */
  private generation = 0;

  constructor(
    private readonly server: PanelServer,
    private readonly signal: AbortSignal,
  ) {
    signal.addEventListener("abort", () => this.close(), { once: true });
  }

  addListener(listener: PoolListener): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  /** Subscribes to a pool, "" for the default one. The pool's whole state is sent first. */
  watch(subscriber: object, pool: string): void {
    this.subscribers.delete(subscriber);
    this.subscribers.set(subscriber, pool);
    this.onSubscribersChange(true);
  }

  /** Subscribes to whichever pool is watched. */
  subscribe(subscriber: object): void {
    if (this.subscribers.has(subscriber)) return;
    this.subscribers.set(subscriber, null);
    this.onSubscribersChange(false);
  }

  /** Removes a subscription. */
  unsubscribe(subscriber: object): void {
    if (this.subscribers.delete(subscriber)) this.onSubscribersChange(false);
  }

  /** Sends an order to the pool; listeners receive the result. */
  order(order: PanelOrder): void {
    if (this.socket?.readyState === OPEN) this.socket.send(JSON.stringify(order));
    else void this.post(order);
  }

  /** Reconnects at once. */
  retry(): void {
    this.stop();
    this.silentSockets = 0;
    this.pause_ms = PAUSE_MS;
    this.setLink({ kind: "connecting", text: "" });
    if (this.watched !== null) this.connect();
  }

  // ---------------------------------------------------------------- subscriptions

  private onSubscribersChange(resend: boolean): void {
    const named = [...this.subscribers.values()].filter((pool) => pool !== null).at(-1);
    const before = this.watched;
    this.watched = this.subscribers.size === 0 ? null : (named ?? (this.model.watched || this.defaultPool));
    if (this.watched === null) {
      if (before !== null) this.stopWatching();
    } else if (resend || this.watched !== before) {
      this.startWatching();
    }
  }

  private startWatching(): void {
    if (this.watched === null || this.signal.aborted) return;
    if (this.watched !== this.model.watched) this.model.switchTo(this.watched);
    if (this.socket?.readyState === OPEN) this.sendWatch(this.socket);
    else if (this.isPolling) this.poll();
    // a socket that is not open yet subscribes when it opens
    else if (!this.socket && this.timer === undefined && this.link.kind !== "refused") this.connect();
  }

  private stopWatching(): void {
    if (this.socket?.readyState === OPEN) this.socket.send(JSON.stringify({ kind: "rest" }));
    else this.stop();
  }

  private sendWatch(socket: Socket): void {
    socket.send(JSON.stringify({ kind: "watch", pool: this.watched ?? "" }));
  }

  // ---------------------------------------------------------------- the websocket

  private connect(): void {
    this.stop();
    const { generation } = this;
    const isCurrent = (): boolean => generation === this.generation;
    let hasReceived = false;
    let socket: Socket;
    try {
      socket = this.server.open(PATH);
    } catch {
      void this.onDisconnect(false);
      return;
    }
    this.socket = socket;
    socket.onopen = () => {
      if (isCurrent() && this.watched !== null) this.sendWatch(socket);
    };
    socket.onmessage = ({ data }: MessageEvent<unknown>) => {
      if (!isCurrent()) return;
      hasReceived = true;
      this.silentSockets = 0;
      this.pause_ms = PAUSE_MS;
      this.applyUpdate(() => JSON.parse(String(data)) as unknown);
    };
    socket.onclose = () => {
      if (!isCurrent()) return;
      this.socket = null;
      void this.onDisconnect(hasReceived);
    };
  }

  /** Requests the state, because browsers do not report why a websocket failed, and schedules the next attempt. */
  private async onDisconnect(hasReceived: boolean): Promise<void> {
    if (this.watched === null) return;
    const { generation } = this;
    // the link state changes only if this request fails too, because the server may have just restarted
    const outcome = await this.requestState();
    if (generation !== this.generation || this.signal.aborted) return;
    if (outcome === "refused") return;
    if (outcome === "absent") {
      this.schedule(ABSENT_PAUSE_MS, () => this.connect());
      return;
    }
    if (outcome === "updated" && !hasReceived) this.silentSockets += 1;
    if (this.silentSockets >= MAX_SILENT_SOCKETS) {
      this.isPolling = true;
      this.schedule(this.pollInterval_ms, () => this.poll());
      return;
    }
    this.schedule(this.pause_ms, () => this.connect());
    this.pause_ms = Math.min(2 * this.pause_ms, MAX_PAUSE_MS);
  }

  // ---------------------------------------------------------------- REST

  private poll(): void {
    this.stop();
    this.isPolling = true;
    const { generation } = this;
    void this.requestState().then((outcome) => {
      if (generation !== this.generation || this.signal.aborted || this.watched === null || outcome === "refused") return;
      if (outcome === "updated") {
        this.schedule(this.pollInterval_ms, () => this.poll());
        return;
      }
      // websockets may work after a restart of the server
      this.isPolling = false;
      this.silentSockets = 0;
      this.schedule(this.pause_ms, () => this.connect());
    });
  }

  /** Requests the whole state once, passes it to the listeners, and returns the outcome. */
  private async requestState(): Promise<"updated" | "absent" | "refused" | "away"> {
    const query = new URLSearchParams({ pool: this.watched ?? "" });
    const { generation } = this;
    let response: Response;
    let body: Partial<Record<"pools" | "pool" | "runs", unknown>> = {};
    try {
      response = await this.server.request(`${PATH}?${query.toString()}`, { method: "GET", signal: this.signal });
      if (response.ok) body = (await response.json()) as typeof body;
    } catch {
      if (generation === this.generation) this.setLink({ kind: "away", text: AWAY });
      return "away";
    }
    if (generation !== this.generation) return "away";
    if (response.ok) {
      for (const update of [body.pools, body.pool, body.runs]) this.applyUpdate(() => update);
      // an update of another version has stopped the connection
      return generation === this.generation ? "updated" : "refused";
    }
    if (response.status === 404) {
      this.setLink({ kind: "absent", text: ABSENT });
      return "absent";
    }
    if (response.status === 401 || response.status === 403) {
      this.setLink({ kind: "refused", text: REFUSED });
      return "refused";
    }
    this.setLink({ kind: "away", text: asSentence(await errorText(response)) });
    return "away";
  }

  private async post(order: PanelOrder): Promise<void> {
    let update: PanelUpdate;
    try {
      const init = { method: "POST", body: JSON.stringify(order), signal: this.signal };
      const response = await this.server.request(`${PATH}/orders`, init);
      update = response.ok
        ? readUpdate(await response.json())
        : { kind: "command-result", ok: false, text: asSentence(await errorText(response)) };
    } catch (error) {
      if (this.signal.aborted) return;
      const text = error instanceof OtherVersion ? error.message : "The Jupyter server does not answer. Try again.";
      update = { kind: "command-result", ok: false, text };
    }
    this.notify((listener) => listener.onUpdate?.(update));
  }

  // ---------------------------------------------------------------- updates

  private applyUpdate(value: () => unknown): void {
    const update = readOrNull(() => {
      try {
        return readUpdate(value());
      } catch (error) {
        if (error instanceof OtherVersion) this.refuse(error.message);
        throw error;
      }
    });
    if (!update) return;
    this.setLink({ kind: "open", text: "" });
    this.model.apply(update);
    this.notify((listener) => listener.onUpdate?.(update));
  }

  private refuse(text: string): void {
    this.stop();
    this.setLink({ kind: "refused", text });
  }

  private setLink(link: PoolLinkState): void {
    if (this.signal.aborted || (link.kind === this.link.kind && link.text === this.link.text)) return;
    this.link = link;
    this.notify((listener) => listener.onLinkChange?.(link));
  }

  private notify(call: (listener: PoolListener) => void): void {
    for (const listener of [...this.listeners]) call(listener);
  }

  // ---------------------------------------------------------------- timers and shutdown

  private schedule(delay_ms: number, callback: () => void): void {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      this.timer = undefined;
      if (!this.signal.aborted && this.watched !== null) callback();
    }, delay_ms);
  }

  /** Closes the websocket or ends polling; results of pending requests are ignored. */
  private stop(): void {
    this.generation += 1;
    clearTimeout(this.timer);
    this.timer = undefined;
    this.isPolling = false;
    const { socket } = this;
    this.socket = null;
    if (!socket) return;
    socket.onopen = socket.onmessage = socket.onclose = null;
    socket.close();
  }

  private close(): void {
    this.stop();
    this.subscribers.clear();
    this.listeners.clear();
    this.watched = null;
  }
}

/** The panel's access to the shared connection, with a subscription of its own. */
export class PanelPools implements PoolLink {
  constructor(
    private readonly connection: PoolConnection,
    private readonly signal: AbortSignal,
  ) {
    signal.addEventListener("abort", () => connection.unsubscribe(this), { once: true });
  }

  order(order: PanelOrder): void {
    if (order.kind === "watch") this.connection.watch(this, order.pool);
    else if (order.kind === "rest") this.connection.unsubscribe(this);
    else this.connection.order(order);
  }

  onUpdate(callback: (update: PanelUpdate) => void): void {
    this.addListener({ onUpdate: callback });
  }

  onLink(callback: (state: PoolLinkState) => void): void {
    this.addListener({ onLinkChange: callback });
    callback(this.connection.link);
  }

  retry(): void {
    this.connection.retry();
  }

  private addListener(listener: PoolListener): void {
    const removeListener = this.connection.addListener(listener);
    this.signal.addEventListener("abort", removeListener, { once: true });
  }
}

function asSentence(text: string): string {
  const first = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(first) ? first : `${first}.`;
}
