import type { IStateDB } from "@jupyterlab/statedb";

const KEY = "sgpu-magic:panel";

/** The panel's state that survives a page reload, in the database where JupyterLab stores its layout. */
export class PanelStorage {
  private values: Record<string, string> = {};

  constructor(private readonly database: IStateDB | null) {}

  /** Loads the stored state. */
  async load(): Promise<void> {
    try {
      const found = await this.database?.fetch(KEY);
      if (typeof found !== "object" || found === null) return;
      for (const [key, value] of Object.entries(found)) if (typeof value === "string") this.values[key] ??= value;
    } catch {
      // the panel works without the stored state
    }
  }

  get(key: string): string | null {
    return this.values[key] ?? null;
  }

  set(key: string, value: string): void {
    this.values = { ...this.values, [key]: value };
    this.database?.save(KEY, this.values).catch(() => undefined);
  }
}
