import type { ISettingRegistry } from "@jupyterlab/settingregistry";

/** The settings of `schema/panel.json`. */
export interface Settings {
  /** "" for the pool in sgpu-magic's settings. */
  readonly defaultPool: string;
  /** Polling interval of pages without a websocket. */
  readonly refresh_s: number;
  readonly showPrices: boolean;
  /** Whether notebooks' toolbars show the session. */
  readonly showChip: boolean;
}

const DEFAULTS: Settings = { defaultPool: "", refresh_s: 2, showPrices: true, showChip: true };
export const SCHEMA = "@sgpu-magic/labextension:panel";

/** The user's settings; the defaults until they are loaded, and in applications without a settings registry. */
export class PanelSettings {
  current: Settings = DEFAULTS;
  private readonly callbacks = new Set<() => void>();

  /** Returns a function that removes the callback. */
  onChange(callback: () => void): () => void {
    this.callbacks.add(callback);
    return () => this.callbacks.delete(callback);
  }

  async load(registry: ISettingRegistry | null): Promise<void> {
    if (!registry) return;
    let found: ISettingRegistry.ISettings;
    try {
      found = await registry.load(SCHEMA);
    } catch (error) {
      console.warn("sgpu: the settings can't be read:", error);
      return;
    }
    found.changed.connect(() => this.take(found.composite));
    this.take(found.composite);
  }

  /** Parses the stored settings; missing and invalid values get their defaults. */
  take(written: Readonly<Record<string, unknown>>): void {
    const { defaultPool, refreshSeconds, showPrices, showChip } = written;
    this.current = {
      defaultPool: typeof defaultPool === "string" ? defaultPool.trim() : DEFAULTS.defaultPool,
      refresh_s: typeof refreshSeconds === "number" && refreshSeconds >= 1 ? refreshSeconds : DEFAULTS.refresh_s,
      showPrices: typeof showPrices === "boolean" ? showPrices : DEFAULTS.showPrices,
      showChip: typeof showChip === "boolean" ? showChip : DEFAULTS.showChip,
    };
    for (const callback of [...this.callbacks]) callback();
  }
}
