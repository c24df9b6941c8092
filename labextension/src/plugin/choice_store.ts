/** The choice last sent to each kernel. A kernel has one choice, and several notebooks may share a kernel. */
export class ChoiceStore {
  private readonly sent = new Map<string, string>();

  /** Returns whether any choice was sent to the kernel. */
  hasAny(kernel: string): boolean {
    return this.sent.has(kernel);
  }

  has(kernel: string, choice: string): boolean {
    return this.sent.get(kernel) === choice;
  }

  set(kernel: string, choice: string): void {
    this.sent.set(kernel, choice);
  }

  /** To be called when the kernel's process was replaced. */
  delete(kernel: string): void {
    this.sent.delete(kernel);
  }
}
