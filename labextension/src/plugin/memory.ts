import type { IStateDB } from "@jupyterlab/statedb";

const KEY = "sgpu-magic:panel";

/** The panel's state that survives a page reload, in the database where JupyterLab stores its layout. */
export class PanelMemory {
  private kept: Record<string, string> = {};

  constructor(private readonly state: IStateDB | null) {}

  /** Loads the stored state. */
  async load(): Promise<void> {
    try {
      const found = await this.state?.fetch(KEY);
      if (typeof found !== "object" || found === null) return;
      for (const [key, value] of Object.entries(found)) if (typeof value === "string") this.kept[key] ??= value;
    } catch {
      // the panel works without the stored state
    }
  }

  get(key: string): string | null {
    return this.kept[key] ?? null;
  }

  set(key: string, value: string): void {
    this.kept = { ...this.kept, [key]: value };
    this.state?.save(KEY, this.kept).catch(() => undefined);
  }
}
