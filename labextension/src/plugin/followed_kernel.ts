import type { ISessionContext } from "@jupyterlab/apputils";
import type { Kernel, KernelMessage } from "@jupyterlab/services";

import type { KernelState } from "../panel/host";

/** The part of a notebook's session that is used here. */
export type Session = Pick<
  ISessionContext,
  "session" | "kernelDisplayStatus" | "kernelChanged" | "statusChanged" | "connectionStatusChanged" | "iopubMessage"
>;

/** Receives the changes of a notebook's kernel. */
export interface KernelListener {
  /** Its id or its state has changed. */
  changed(): void;
  /** A cell has ended, of this notebook or another one. */
  cellEnded(): void;
  /** Its process was replaced, by another kernel's or in a restart: the state of the previous one is lost. */
  replaced(isOtherKernel: boolean): void;
  /** It reports that it has loaded or unloaded sgpu-magic. */
  announced(isLoaded: boolean): void;
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
/** Requests that the kernel's main shell handles: the end of any other request says nothing about a cell. */
const ON_SHELL = new Set(["execute_request", "kernel_info_request"]);

/** Returns whether the message says that sgpu-magic is loaded or unloaded, null for any other message. */
function announced(message: KernelMessage.IMessage): boolean | null {
  const { metadata } = message.content as { readonly metadata?: Readonly<Record<string, unknown>> };
  const sgpu = metadata?.["sgpu_magic"] as { readonly loaded?: unknown } | undefined;
  return typeof sgpu?.loaded === "boolean" ? sgpu.loaded : null;
}

/**
 * Follows the current kernel of a notebook.
 *
 * Only the main shell's requests count for `busy`. JupyterLab's own status also changes with requests on the control
 * channel, including those of the panel, even while a cell runs.
 */
export class FollowedKernel {
  private id: string;
  private last: KernelState = "none";
  private isBusy: boolean | null = null;
  private wasConnected = false;
  /** The session id in the messages of the kernel's process. */
  private process = "";

  constructor(
    private readonly context: Session,
    private readonly listener: KernelListener,
    signal: AbortSignal,
  ) {
    this.id = this.connection?.id ?? "";
    this.last = this.read();
    const kernelChanged = (): void => this.look();
    const statusChanged = (_: unknown, status: Kernel.Status): void => this.statusChanged(status);
    const iopub = (_: unknown, message: KernelMessage.IMessage): void => this.onMessage(message);
    context.kernelChanged.connect(kernelChanged);
    context.statusChanged.connect(statusChanged);
    context.connectionStatusChanged.connect(kernelChanged);
    context.iopubMessage.connect(iopub);
    signal.addEventListener(
      "abort",
      () => {
        context.kernelChanged.disconnect(kernelChanged);
        context.statusChanged.disconnect(statusChanged);
        context.connectionStatusChanged.disconnect(kernelChanged);
        context.iopubMessage.disconnect(iopub);
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
    return this.last;
  }

  private statusChanged(status: Kernel.Status): void {
    const isRestarting = status === "restarting" || status === "autorestarting";
    if (isRestarting && this.last !== "restarting") this.forget(false);
    this.look();
  }

  private onMessage(message: KernelMessage.IMessage): void {
    // messages without a parent may come from the server, which reports restarts in the kernel's name
    const asked = "msg_type" in message.parent_header ? message.parent_header.msg_type : "";
    if (!asked) return;
    const { session } = message.header;
    if (this.process !== "" && session !== this.process) this.forget(false);
    this.process = session;
    const isLoaded = announced(message);
    if (isLoaded !== null) this.listener.announced(isLoaded);
    if (message.header.msg_type !== "status" || !ON_SHELL.has(asked)) return;
    const state = (message as KernelMessage.IStatusMsg).content.execution_state;
    if (state !== "busy" && state !== "idle") return;
    this.isBusy = state === "busy";
    if (state === "idle" && asked === "execute_request") {
      this.last = this.read();
      this.listener.cellEnded();
    } else {
      this.look();
    }
  }

  private look(): void {
    const id = this.connection?.id ?? "";
    const isOther = id !== this.id;
    if (isOther) {
      this.id = id;
      this.wasConnected = false;
      this.forget(true);
    }
    const state = this.read();
    if (!isOther && state === this.last) return;
    this.last = state;
    this.listener.changed();
  }

  private forget(isOtherKernel: boolean): void {
    this.isBusy = null;
    this.process = "";
    this.listener.replaced(isOtherKernel);
  }

  private read(): KernelState {
    const { connection } = this;
    // checked first: the display status hides it when the connection is closed
    if (connection?.status === "dead") return "dead";
    const status = this.context.kernelDisplayStatus;
    if (connection?.connectionStatus === "connected") this.wasConnected = true;
    if (status === "connecting") {
      if (this.last === "restarting") return "restarting";
      // JupyterLab is reconnecting
      return this.wasConnected ? "disconnected" : "starting";
    }
    if (status === "unknown" && !connection) return "none";
    const known = STATES[status];
    if (known) return known;
    // unknown while connected: usually in a cell since before the page was loaded; requests are still possible
    const current = status === "unknown" ? "busy" : status;
    this.isBusy ??= current === "busy";
    return this.isBusy ? "busy" : "idle";
  }
}
