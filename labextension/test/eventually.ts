import { vi } from "vitest";

/** Waits until `check` no longer throws, with a deadline that allows for a busy machine; returns its value. */
export function eventually<T>(check: () => T): Promise<Awaited<T>> {
  return vi.waitFor(check, { timeout: 20_000, interval: 20 }) as Promise<Awaited<T>>;
}
