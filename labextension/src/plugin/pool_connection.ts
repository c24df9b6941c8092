import type { PoolLink, PoolLinkState } from "../panel/host";
import { OtherVersion, readTold } from "../panel/messages";
import type { PanelOrder, Told } from "../panel/messages";
import { PoolModel } from "../panel/pool_model";
import { readOrNull } from "../shared/model_questions";
import { reason } from "./run_server";
import type { Request } from "./run_server";

/** After a failure, which doubles it up to the longest. */
export const PAUSE_MS = 500;
export const LONGEST_PAUSE_MS = 8_000;
/** A server without sgpu-magic may have it after its restart. */
export const ABSENT_PAUSE_MS = 60_000;
/** So many websockets that bring nothing, while the server answers: something between lets none through. */
export const MOST_MUTE = 3;

const PATH = "sgpu/panel";
const OPEN = 1;
const AWAY = "The Jupyter server does not answer.";
const ABSENT = "This Jupyter server has no sgpu-magic.";
const REFUSED = "The Jupyter server denies this page access to pools.";

/** What is used of a websocket. */
export type Socket = Pick<WebSocket, "readyState" | "send" | "close" | "onopen" | "onmessage" | "onclose">;

/** The way to the Jupyter server; paths are below its base URL. */
export interface PanelServer {
  open(path: string): Socket;
  readonly request: Request;
}

/** Who wants to know what comes. */
export interface PoolListener {
  told?(told: Told): void;
  linked?(link: PoolLinkState): void;
}

/**
 * The page's one connection to the Jupyter server's pools: for the panel, and for what stands in notebooks' toolbars.
 *
 * A websocket, opened again when it is lost; where none comes through, the server is asked again and again. Nothing is
 * asked while nobody looks.
 */
export class PoolConnection {
  /** What was told, folded. */
  readonly model = new PoolModel();
  link: PoolLinkState = { kind: "connecting", text: "" };
  /** Of a page that polls. */
  pollEvery_ms = 2_000;
  /** The pool that is looked at until somebody names one, "" for the settings' of sgpu-magic. */
  preferred = "";

  private readonly listeners = new Set<PoolListener>();
  /** Who looks, at which pool; null at whichever is looked at. */
  private readonly users = new Map<object, string | null>();
  private watched: string | null = null;
  private socket: Socket | null = null;
  private polling = false;
  private mute = 0;
  private pause_ms = PAUSE_MS;
  private timer: ReturnType<typeof setTimeout> | undefined;
  /** Grows with every new start: what an older one still brings is left out. */
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

  /** Somebody looks at a pool, "" the default one: all of it is told first. */
  watch(user: object, pool: string): void {
    this.users.delete(user);
    this.users.set(user, pool);
    this.usersChanged(true);
  }

  /** Somebody looks at whatever pool is looked at. */
  keep(user: object): void {
    if (this.users.has(user)) return;
    this.users.set(user, null);
    this.usersChanged(false);
  }

  /** Somebody looks no more. */
  rest(user: object): void {
    if (this.users.delete(user)) this.usersChanged(false);
  }

  /** Has something done; what became of it is told. */
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

  // ---------------------------------------------------------------- who looks

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
    if (this.watched !== this.model.watched) this.model.watch(this.watched);
    if (this.socket?.readyState === OPEN) this.sendWatch(this.socket);
    else if (this.polling) this.poll();
    // else it is sent when it opens
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

  /** No websocket: the server is asked for the reason, which a page is not told otherwise. */
  private async lost(hasSpoken: boolean): Promise<void> {
    if (this.watched === null) return;
    const { turn } = this;
    // a server that restarts is not there for a moment: that is said when it lasts
    const found = await this.ask();
    if (turn !== this.turn || this.signal.aborted) return;
    if (found === "refused") return;
    if (found === "absent") {
      this.later(ABSENT_PAUSE_MS, () => this.connect());
      return;
    }
    if (found === "told" && !hasSpoken) this.mute += 1;
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
      if (found === "told") {
        this.later(this.pollEvery_ms, () => this.poll());
        return;
      }
      // another server comes up: it may let websockets through
      this.polling = false;
      this.mute = 0;
      this.later(this.pause_ms, () => this.connect());
    });
  }

  /** Asks for everything once, tells it, and says how that went. */
  private async ask(): Promise<"told" | "absent" | "refused" | "away"> {
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
      for (const told of [body.pools, body.pool, body.runs]) this.take(() => told);
      // another version has stopped everything
      return turn === this.turn ? "told" : "refused";
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
    let told: Told;
    try {
      const init = { method: "POST", body: JSON.stringify(order), signal: this.signal };
      const response = await this.server.request(`${PATH}/orders`, init);
      told = response.ok
        ? readTold(await response.json())
        : { kind: "said", ok: false, text: sentence(await reason(response)) };
    } catch (error) {
      if (this.signal.aborted) return;
      const text = error instanceof OtherVersion ? error.message : "The Jupyter server does not answer. Try again.";
      told = { kind: "said", ok: false, text };
    }
    this.tell((listener) => listener.told?.(told));
  }

  // ---------------------------------------------------------------- what comes

  private take(value: () => unknown): void {
    const told = readOrNull(() => {
      try {
        return readTold(value());
      } catch (error) {
        if (error instanceof OtherVersion) this.refuse(error.message);
        throw error;
      }
    });
    if (!told) return;
    this.setLink({ kind: "open", text: "" });
    this.model.take(told);
    this.tell((listener) => listener.told?.(told));
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

  // ---------------------------------------------------------------- ends

  private later(delay_ms: number, then: () => void): void {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => {
      this.timer = undefined;
      if (!this.signal.aborted && this.watched !== null) then();
    }, delay_ms);
  }

  /** Ends what goes on; what is still under way is left out when it comes. */
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

/** The connection as the panel sees it. */
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

  onTold(callback: (told: Told) => void): void {
    this.listen({ told: callback });
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
