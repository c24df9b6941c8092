/** The choice last sent to each kernel: a kernel has one choice, and several notebooks may share the kernel. */
export class ChoiceStore {
  private readonly sent = new Map<string, string>();

  /** @returns Whether any choice was sent to the kernel. */
  knowsAny(kernel: string): boolean {
    return this.sent.has(kernel);
  }

  knows(kernel: string, kept: string): boolean {
    return this.sent.get(kernel) === kept;
  }

  tell(kernel: string, kept: string): void {
    this.sent.set(kernel, kept);
  }

  /** Called when the kernel's process was replaced. */
  forget(kernel: string): void {
    this.sent.delete(kernel);
  }
}
