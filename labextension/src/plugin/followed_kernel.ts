import type { ISessionContext } from "@jupyterlab/apputils";
import type { Kernel, KernelMessage } from "@jupyterlab/services";

import type { KernelState } from "../panel/host";

/** What is used of a notebook's session. */
export type Session = Pick<
  ISessionContext,
  "session" | "kernelDisplayStatus" | "kernelChanged" | "statusChanged" | "connectionStatusChanged" | "iopubMessage"
>;

/** What can happen to a kernel that its notebook wants to know. */
export interface KernelListener {
  /** Its id or its state is another. */
  changed(): void;
  /** A cell has ended, of this notebook or another one. */
  cellEnded(): void;
  /** Its process is another, of another kernel or of the same one: what it knew is forgotten. */
  replaced(isOtherKernel: boolean): void;
  /** It says that it has loaded sgpu-magic, or unloaded it. */
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
/** The messages that the kernel's main shell works on: another one's end says nothing about a cell. */
const ON_SHELL = new Set(["execute_request", "kernel_info_request"]);

/** Returns whether the message says that sgpu-magic is loaded or unloaded, null for any other message. */
function announced(message: KernelMessage.IMessage): boolean | null {
  const { metadata } = message.content as { readonly metadata?: Readonly<Record<string, unknown>> };
  const said = metadata?.["sgpu_magic"] as { readonly loaded?: unknown } | undefined;
  return typeof said?.loaded === "boolean" ? said.loaded : null;
}

/**
 * The kernel of a notebook, whichever it is.
 *
 * Whether it is busy is told by cells alone: questions on the control channel, ours too, make JupyterLab's own status
 * change to and fro, also while a cell runs.
 */
export class FollowedKernel {
  private id: string;
  private last: KernelState = "none";
  private isBusy: boolean | null = null;
  private wasConnected = false;
  /** The session of the process' own messages. */
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
    const iopub = (_: unknown, message: KernelMessage.IMessage): void => this.heard(message);
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

  private heard(message: KernelMessage.IMessage): void {
    // others speak in the kernel's name, and their words are no answers: the server says that it restarts
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
    // a connection to it says so no more
    if (connection?.status === "dead") return "dead";
    const status = this.context.kernelDisplayStatus;
    if (connection?.connectionStatus === "connected") this.wasConnected = true;
    if (status === "connecting") {
      if (this.last === "restarting") return "restarting";
      // JupyterLab tries to reach it again
      return this.wasConnected ? "disconnected" : "starting";
    }
    if (status === "unknown" && !connection) return "none";
    const known = STATES[status];
    if (known) return known;
    // connected, and not heard of: in a cell since before this page, most of the time. It can be asked all the same
    const told = status === "unknown" ? "busy" : status;
    this.isBusy ??= told === "busy";
    return this.isBusy ? "busy" : "idle";
  }
}
