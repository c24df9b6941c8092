/** Which notebook's choice each kernel was told last: it has one, several notebooks may have it. */
export class KeptChoices {
  private readonly told = new Map<string, string>();

  /** @returns Whether the kernel knows a choice, this one or another. */
  knowsAny(kernel: string): boolean {
    return this.told.has(kernel);
  }

  knows(kernel: string, kept: string): boolean {
    return this.told.get(kernel) === kept;
  }

  tell(kernel: string, kept: string): void {
    this.told.set(kernel, kept);
  }

  /** The kernel is another process, or gone. */
  forget(kernel: string): void {
    this.told.delete(kernel);
  }
}
