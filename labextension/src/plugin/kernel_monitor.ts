import type { ISessionContext } from "@jupyterlab/apputils";
import type { Kernel, KernelMessage } from "@jupyterlab/services";

import type { KernelState } from "../panel/host";

/** The members of a notebook's session context that the monitor uses. */
export type MonitoredSession = Pick<
  ISessionContext,
  "session" | "kernelDisplayStatus" | "kernelChanged" | "statusChanged" | "connectionStatusChanged" | "iopubMessage"
>;

/** Receives the changes of a notebook's kernel. */
export interface KernelListener {
  /** The kernel's id or state has changed. */
  onChange(): void;
  /** A cell of this notebook, or of another one with the same kernel, has ended. */
  onCellEnd(): void;
  /** The kernel was restarted or replaced by another one, and its state is lost. */
  onReplaced(isOtherKernel: boolean): void;
  /** The kernel has loaded or unloaded sgpu-magic. */
  onLoadedChange(isLoaded: boolean): void;
}

const STATES: Readonly<Record<string, KernelState>> = {
  initializing: "starting",
  starting: "starting",
  restarting: "restarting",
  autorestarting: "restarting",
  terminating: "dead",
  dead: "dead",
  disconnected: "disconnected",
};
/** Requests that the kernel's main shell handles. Other requests may end while a cell runs. */
const SHELL_REQUESTS = new Set(["execute_request", "kernel_info_request"]);

/** Returns whether sgpu-magic is loaded according to a message, null if the message does not contain it. */
function readLoaded(message: KernelMessage.IMessage): boolean | null {
  const { metadata } = message.content as { readonly metadata?: Readonly<Record<string, unknown>> };
  const sgpu = metadata?.["sgpu_magic"] as { readonly loaded?: unknown } | undefined;
  return typeof sgpu?.loaded === "boolean" ? sgpu.loaded : null;
}

/**
 * Tracks the state of a notebook's current kernel.
 *
 * Only the main shell's requests count for `busy`. JupyterLab's own status also changes with requests on the control
 * channel, including those of the panel, even while a cell runs.
 */
export class KernelMonitor {
  private id: string;
  private lastState: KernelState = "none";
  private isBusy: boolean | null = null;
  private wasConnected = false;
  /** The session id in the kernel's messages, which identifies its process. */
  private processSession = "";

  constructor(
    private readonly context: MonitoredSession,
    private readonly listener: KernelListener,
    signal: AbortSignal,
  ) {
    this.id = this.connection?.id ?? "";
    this.lastState = this.readState();
    const update = (): void => this.update();
    const onStatus = (_: unknown, status: Kernel.Status): void => this.onStatus(status);
    const onIopub = (_: unknown, message: KernelMessage.IMessage): void => this.onMessage(message);
    context.kernelChanged.connect(update);
    context.statusChanged.connect(onStatus);
    context.connectionStatusChanged.connect(update);
    context.iopubMessage.connect(onIopub);
    signal.addEventListener(
      "abort",
      () => {
        context.kernelChanged.disconnect(update);
        context.statusChanged.disconnect(onStatus);
        context.connectionStatusChanged.disconnect(update);
        context.iopubMessage.disconnect(onIopub);
      },
      { once: true },
    );
  }

  get connection(): Kernel.IKernelConnection | null {
    return this.context.session?.kernel ?? null;
  }

  get kernelId(): string {
    return this.id;
  }

  get state(): KernelState {
    return this.lastState;
  }

  private onStatus(status: Kernel.Status): void {
    const isRestarting = status === "restarting" || status === "autorestarting";
    if (isRestarting && this.lastState !== "restarting") this.reset(false);
    this.update();
  }

  private onMessage(message: KernelMessage.IMessage): void {
    // messages without a parent may come from the server, which reports restarts on behalf of the kernel
    const parentType = "msg_type" in message.parent_header ? message.parent_header.msg_type : "";
    if (!parentType) return;
    const { session } = message.header;
    if (this.processSession !== "" && session !== this.processSession) this.reset(false);
    this.processSession = session;
    const isLoaded = readLoaded(message);
    if (isLoaded !== null) this.listener.onLoadedChange(isLoaded);
    if (message.header.msg_type !== "status" || !SHELL_REQUESTS.has(parentType)) return;
    const state = (message as KernelMessage.IStatusMsg).content.execution_state;
    if (state !== "busy" && state !== "idle") return;
    this.isBusy = state === "busy";
    if (state === "idle" && parentType === "execute_request") {
      this.lastState = this.readState();
      this.listener.onCellEnd();
    } else {
      this.update();
    }
  }

  private update(): void {
    const id = this.connection?.id ?? "";
    const isOther = id !== this.id;
    if (isOther) {
      this.id = id;
      this.wasConnected = false;
      this.reset(true);
    }
    const state = this.readState();
    if (!isOther && state === this.lastState) return;
    this.lastState = state;
    this.listener.onChange();
  }

  private reset(isOtherKernel: boolean): void {
    this.isBusy = null;
    this.processSession = "";
    this.listener.onReplaced(isOtherKernel);
  }

  private readState(): KernelState {
    const { connection } = this;
    // checked first, because the display status does not show it when the connection is closed
    if (connection?.status === "dead") return "dead";
    const status = this.context.kernelDisplayStatus;
    if (connection?.connectionStatus === "connected") this.wasConnected = true;
    if (status === "connecting") {
      if (this.lastState === "restarting") return "restarting";
      // JupyterLab is reconnecting
      return this.wasConnected ? "disconnected" : "starting";
    }
    if (status === "unknown" && !connection) return "none";
    const known = STATES[status];
    if (known) return known;
    // an unknown status while connected usually means that a cell has been running since before the page was loaded
    const current = status === "unknown" ? "busy" : status;
    this.isBusy ??= current === "busy";
    return this.isBusy ? "busy" : "idle";
  }
}
