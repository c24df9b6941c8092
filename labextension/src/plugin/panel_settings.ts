import type { ISettingRegistry } from "@jupyterlab/settingregistry";

/** The settings of `schema/panel.json`. */
export interface Settings {
  /** "" for the pool in sgpu-magic's settings. */
  readonly defaultPool: string;
  /** Polling interval of pages without a websocket, in seconds. */
  readonly refresh_s: number;
  readonly showPrices: boolean;
  /** Whether notebooks' toolbars show the session. */
  readonly showChip: boolean;
  /** Whether long runs that end while nobody looks at the page are reported. */
  readonly notifyRunEnd: boolean;
}

const DEFAULTS: Settings = { defaultPool: "", refresh_s: 2, showPrices: true, showChip: true, notifyRunEnd: false };
export const SCHEMA = "@sgpu-magic/labextension:panel";

/** The user's settings. They have their defaults until they are loaded, and in applications without a registry. */
export class PanelSettings {
  current: Settings = DEFAULTS;
  private readonly callbacks = new Set<() => void>();

  /** Calls back after each change. Returns a function that removes the callback. */
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
    found.changed.connect(() => this.apply(found.composite));
    this.apply(found.composite);
  }

  /** Applies stored settings; missing and invalid values get their defaults. */
  apply(stored: Readonly<Record<string, unknown>>): void {
    const { defaultPool, refreshSeconds, showPrices, showChip, notifyRunEnd } = stored;
    this.current = {
      defaultPool: typeof defaultPool === "string" ? defaultPool.trim() : DEFAULTS.defaultPool,
      refresh_s: typeof refreshSeconds === "number" && refreshSeconds >= 1 ? refreshSeconds : DEFAULTS.refresh_s,
      showPrices: typeof showPrices === "boolean" ? showPrices : DEFAULTS.showPrices,
      showChip: typeof showChip === "boolean" ? showChip : DEFAULTS.showChip,
      notifyRunEnd: typeof notifyRunEnd === "boolean" ? notifyRunEnd : DEFAULTS.notifyRunEnd,
    };
    for (const callback of [...this.callbacks]) callback();
  }
}
