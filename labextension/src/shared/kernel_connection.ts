/**
 * The part of a JupyterLab kernel connection that the views use, where the front end has one.
 *
 * Declared structurally: VS Code, Colab and others give widgets no such object, and any member may be missing.
 */

export interface Signal<T> {
  connect(slot: (sender: unknown, value: T) => void): unknown;
  disconnect(slot: (sender: unknown, value: T) => void): unknown;
}

interface ControlReply {
  readonly content: { readonly status?: string; readonly answer?: unknown; readonly evalue?: string };
}

interface ControlFuture {
  onReply: (message: ControlReply) => void;
  readonly done: Promise<unknown>;
  dispose?(): void;
}

export interface KernelConnection {
  readonly clientId?: string;
  readonly username?: string;
  readonly supportsSubshells?: boolean;
  readonly status?: string;
  readonly isDisposed?: boolean;
  readonly statusChanged?: Signal<string>;
  readonly connectionStatusChanged?: Signal<string>;
  readonly disposed?: Signal<unknown>;
  sendControlMessage?(message: unknown, expectReply: boolean, disposeOnDone: boolean): ControlFuture;
  interrupt?(): Promise<void>;
}

/** The message type that the kernel answers on its control channel while a cell runs. */
const REQUEST = "sgpu_request";

/**
 * Sends a request over the kernel's control channel.
 *
 * @param signal: Ends the wait for the reply: a kernel that does not know the message may never reply.
 * @throws Error: The kernel does not know the message, or refuses it.
 */
export function askOverControl(
  kernel: KernelConnection,
  modelId: string,
  question: unknown,
  signal?: AbortSignal,
): Promise<unknown> {
  return new Promise((resolve, reject) => {
    if (!kernel.sendControlMessage) {
      reject(new Error("this front end has no control channel"));
      return;
    }
    const future = kernel.sendControlMessage(controlMessage(kernel, modelId, question), true, true);
    signal?.addEventListener("abort", () => future.dispose?.(), { once: true });
    future.onReply = ({ content }) => {
      if (content.status === "ok" && content.answer !== undefined) resolve(content.answer);
      else reject(new Error(content.evalue ?? "the kernel has no answer"));
    };
    // done without a reply: the connection was closed or the kernel has ended
    future.done.then(() => reject(new Error("the kernel has not replied")), reject);
  });
}

function controlMessage(kernel: KernelConnection, modelId: string, question: unknown) {
  return {
    header: {
      msg_id: uuid(),
      msg_type: REQUEST,
      session: kernel.clientId ?? "",
      username: kernel.username ?? "",
      version: "5.2",
      date: new Date().toISOString(),
      subshell_id: null,
    },
    parent_header: {},
    metadata: {},
    content: { model_id: modelId, question },
    channel: "control",
    buffers: [],
  };
}

/** A random identifier; `crypto.randomUUID` exists only on secure pages. */
function uuid(): string {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Returns the kernel connection of a widget's manager, null where the front end provides none. */
export function kernelConnectionOf(manager: unknown): KernelConnection | null {
  if (typeof manager !== "object" || manager === null) return null;
  const kernel = (manager as { kernel?: unknown }).kernel;
  return typeof kernel === "object" && kernel !== null ? kernel : null;
}
