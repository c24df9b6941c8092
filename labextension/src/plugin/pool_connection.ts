import type { PoolLink, PoolLinkState } from "../panel/host";
import { OtherVersion, readUpdate } from "../panel/messages";
import type { PanelOrder, PanelUpdate } from "../panel/messages";
import { PoolModel } from "../panel/pool_model";
import { readOrNull } from "../shared/widget_requests";
import { reason } from "./run_server";
import type { Request } from "./run_server";

/** Pause after a failure; each further one doubles it, up to the longest. */
export const PAUSE_MS = 500;
export const LONGEST_PAUSE_MS = 8_000;
/** Pause if the server has no sgpu-magic: it may have it after a restart. */
export const ABSENT_PAUSE_MS = 60_000;
/** Give up on websockets after this many silent ones: a proxy probably blocks them. */
export const MOST_MUTE = 3;

const PATH = "sgpu/panel";
const OPEN = 1;
const AWAY = "The Jupyter server does not answer.";
const ABSENT = "This Jupyter server has no sgpu-magic.";
const REFUSED = "The Jupyter server denies this page access to pools.";

/** The part of a websocket that is used here. */
export type Socket = Pick<WebSocket, "readyState" | "send" | "close" | "onopen" | "onmessage" | "onclose">;

/** Access to the Jupyter server; paths are relative to its base URL. */
export interface PanelServer {
  open(path: string): Socket;
  readonly request: Request;
}

/** Receives updates from the pool. */
export interface PoolListener {
  onUpdate?(update: PanelUpdate): void;
  linked?(link: PoolLinkState): void;
}

/**
 * The page's only connection to the Jupyter server's pools, shared by the panel and the buttons in notebooks' toolbars.
 *
 * Uses a websocket, reopened when it is lost; polls the server where a proxy blocks websockets. Requests no updates
 * while there is no subscription.
 */
export class PoolConnection {
  /** The state folded from all updates. */
  readonly model = new PoolModel();
  link: PoolLinkState = { kind: "connecting", text: "" };
  /** Polling interval where websockets are blocked. */
  pollEvery_ms = 2_000;
  /** The pool to watch until a subscription names one, "" for the one in sgpu-magic's settings. */
  preferred = "";

  private readonly listeners = new Set<PoolListener>();
  /** Each subscriber's pool; null for whichever pool is watched. */
  private readonly users = new Map<object, string | null>();
  private watched: string | null = null;
  private socket: Socket | null = null;
  private polling = false;
  private mute = 0;
  private pause_ms = PAUSE_MS;
  private timer: ReturnType<typeof setTimeout> | undefined;
  /** Incremented by every `stop`: later results of earlier requests are ignored. */
  private turn = 0;

  constructor(
    private readonly server: PanelServer,
    private readonly signal: AbortSignal,
  ) {
    signal.addEventListener("abort", () => this.close(), { once: true });
  }

  listen(listener: PoolListener): () => void {
    this.listeners.add(listener);
    return () => this.listeners.delete(listener);
  }

  /** Subscribes to a pool, "" for the default one; its whole state is sent first. */
  watch(user: object, pool: string): void {
    this.users.delete(user);
    this.users.set(user, pool);
    this.usersChanged(true);
  }

  /** Subscribes to whichever pool is watched. */
  keep(user: object): void {
    if (this.users.has(user)) return;
    this.users.set(user, null);
    this.usersChanged(false);
  }

  /** Unsubscribe. */
  rest(user: object): void {
    if (this.users.delete(user)) this.usersChanged(false);
  }

  /** Sends an order; listeners receive its outcome. */
  order(order: PanelOrder): void {
    if (this.socket?.readyState === OPEN) this.socket.send(JSON.stringify(order));
    else void this.post(order);
  }

  /** Tries again at once. */
  retry(): void {
    this.stop();
    this.mute = 0;
    this.pause_ms = PAUSE_MS;
    this.setLink({ kind: "connecting", text: "" });
    if (this.watched !== null) this.connect();
  }

  // ---------------------------------------------------------------- subscriptions

  private usersChanged(again: boolean): void {
    const named = [...this.users.values()].filter((pool) => pool !== null).at(-1);
    const before = this.watched;
    this.watched = this.users.size === 0 ? null : (named ?? (this.model.watched || this.preferred));
    if (this.watched === null) {
      if (before !== null) this.restNow();
    } else if (again || this.watched !== before) {
      this.watchNow();
    }
  }

  private watchNow(): void {
    if (this.watched === null || this.signal.aborted) return;
    if (this.watched !== this.model.watched) this.model.switchTo(this.watched);
    if (this.socket?.readyState === OPEN) this.sendWatch(this.socket);
    else if (this.polling) this.poll();
    // otherwise it is sent when the socket opens
    else if (!this.socket && this.timer === undefined && this.link.kind !== "refused") this.connect();
  }

  private restNow(): void {
    if (this.socket?.readyState === OPEN) this.socket.send(JSON.stringify({ kind: "rest" }));
    else this.stop();
  }

  private sendWatch(socket: Socket): void {
    socket.send(JSON.stringify({ kind: "watch", pool: this.watched ?? "" }));
  }

  // ---------------------------------------------------------------- the websocket

  private connect(): void {
    this.stop();
    const { turn } = this;
    const isNow = (): boolean => turn === this.turn;
    let hasSpoken = false;
    let socket: Socket;
    try {
      socket = this.server.open(PATH);
    } catch {
      void this.lost(false);
      return;
    }
    this.socket = socket;
    socket.onopen = () => {
      if (isNow() && this.watched !== null) this.sendWatch(socket);
    };
    socket.onmessage = ({ data }: MessageEvent<unknown>) => {
      if (!isNow()) return;
      hasSpoken = true;
      this.mute = 0;
      this.pause_ms = PAUSE_MS;
      this.take(() => JSON.parse(String(data)) as unknown);
    };
    socket.onclose = () => {
      if (!isNow()) return;
      this.socket = null;
      void this.lost(hasSpoken);
    };
  }

  /** Requests the reason over HTTP: browsers do not report why a websocket failed. */
  private async lost(hasSpoken: boolean): Promise<void> {
    if (this.watched === null) return;
    const { turn } = this;
    // the link state changes only if this fails too: the server may be back from a restart
    const found = await this.ask();
    if (turn !== this.turn || this.signal.aborted) return;
    if (found === "refused") return;
    if (found === "absent") {
      this.later(ABSENT_PAUSE_MS, () => this.connect());
      return;
    }
    if (found === "updated" && !hasSpoken) this.mute += 1;
    if (this.mute >= MOST_MUTE) {
      this.polling = true;
      this.later(this.pollEvery_ms, () => this.poll());
      return;
    }
    this.later(this.pause_ms, () => this.connect());
    this.pause_ms = Math.min(2 * this.pause_ms, LONGEST_PAUSE_MS);
  }

  // ---------------------------------------------------------------- REST

  private poll(): void {
    this.stop();
    this.polling = true;
    const { turn } = this;
    void this.ask().then((found) => {
      if (turn !== this.turn || this.signal.aborted || this.watched === null || found === "refused") return;
      if (found === "updated") {
        this.later(this.pollEvery_ms, () => this.poll());
        return;
      }
      // after the server has restarted, websockets may work
      this.polling = false;
      this.mute = 0;
      this.later(this.pause_ms, () => this.connect());
    });
  }

  /** Requests the whole state once, passes it to the listeners, and returns the outcome. */
  private async ask(): Promise<"updated" | "absent" | "refused" | "away"> {
    const query = new URLSearchParams({ pool: this.watched ?? "" });
    const { turn } = this;
    let response: Response;
    let body: Partial<Record<"pools" | "pool" | "runs", unknown>> = {};
    try {
      response = await this.server.request(`${PATH}?${query.toString()}`, { method: "GET", signal: this.signal });
      if (response.ok) body = (await response.json()) as typeof body;
    } catch {
      if (turn === this.turn) this.setLink({ kind: "away", text: AWAY });
      return "away";
    }
    if (turn !== this.turn) return "away";
    if (response.ok) {
      for (const update of [body.pools, body.pool, body.runs]) this.take(() => update);
      // an update of another version stops the connection
      return turn === this.turn ? "updated" : "refused";
    }
    if (response.status === 404) {
      this.setLink({ kind: "absent", text: ABSENT });
      return "absent";
    }
    if (response.status === 401 || response.status === 403) {
      this.setLink({ kind: "refused", text: REFUSED });
      return "refused";
    }
    this.setLink({ kind: "away", text: sentence(await reason(response)) });
    return "away";
  }

  private async post(order: PanelOrder): Promise<void> {
    let update: PanelUpdate;
    try {
      const init = { method: "POST", body: JSON.stringify(order), signal: this.signal };
      const response = await this.server.request(`${PATH}/orders`, init);
      update = response.ok
        ? readUpdate(await response.json())
        : { kind: "command-result", ok: false, text: sentence(await reason(response)) };
    } catch (error) {
      if (this.signal.aborted) return;
      const text = error instanceof OtherVersion ? error.message : "The Jupyter server does not answer. Try again.";
      update = { kind: "command-result", ok: false, text };
    }
    this.tell((listener) => listener.onUpdate?.(update));
  }

  // ---------------------------------------------------------------- updates

  private take(value: () => unknown): void {
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
    this.tell((listener) => listener.onUpdate?.(update));
  }

  private refuse(text: string): void {
    this.stop();
    this.setLink({ kind: "refused", text });
  }

  private setLink(link: PoolLinkState): void {
    if (this.signal.aborted || (link.kind === this.link.kind && link.text === this.link.text)) return;
    this.link = link;
    this.tell((listener) => listener.linked?.(link));
  }

  private tell(call: (listener: PoolListener) => void): void {
    for (const listener of [...this.listeners]) call(listener);
  }

  // ---------------------------------------------------------------- timers and shutdown

  private later(delay_ms: number, then: () => void): void {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      this.timer = undefined;
      if (!this.signal.aborted && this.watched !== null) then();
    }, delay_ms);
  }

  /** Closes the websocket or ends polling; results of pending requests are ignored. */
  private stop(): void {
    this.turn += 1;
    clearTimeout(this.timer);
    this.timer = undefined;
    this.polling = false;
    const { socket } = this;
    this.socket = null;
    if (!socket) return;
    socket.onopen = socket.onmessage = socket.onclose = null;
    socket.close();
  }

  private close(): void {
    this.stop();
    this.users.clear();
    this.listeners.clear();
    this.watched = null;
  }
}

/** The connection as the panel uses it, with one subscription. */
export class PanelPools implements PoolLink {
  constructor(
    private readonly connection: PoolConnection,
    private readonly signal: AbortSignal,
  ) {
    signal.addEventListener("abort", () => connection.rest(this), { once: true });
  }

  order(order: PanelOrder): void {
    if (order.kind === "watch") this.connection.watch(this, order.pool);
    else if (order.kind === "rest") this.connection.rest(this);
    else this.connection.order(order);
  }

  onUpdate(callback: (update: PanelUpdate) => void): void {
    this.listen({ onUpdate: callback });
  }

  onLink(callback: (state: PoolLinkState) => void): void {
    this.listen({ linked: callback });
    callback(this.connection.link);
  }

  retry(): void {
    this.connection.retry();
  }

  private listen(listener: PoolListener): void {
    const unlisten = this.connection.listen(listener);
    this.signal.addEventListener("abort", unlisten, { once: true });
  }
}

function sentence(text: string): string {
  const first = text.charAt(0).toUpperCase() + text.slice(1);
  return /[.!?]$/.test(first) ? first : `${first}.`;
}
