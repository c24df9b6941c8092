import type { ISettingRegistry } from "@jupyterlab/settingregistry";

/** What `schema/panel.json` describes. */
export interface Settings {
  /** "" for the one of sgpu-magic's own settings. */
  readonly defaultPool: string;
  /** Of pages that no websocket reaches. */
  readonly refresh_s: number;
  readonly showPrices: boolean;
  /** The session stands in notebooks' toolbars. */
  readonly showChip: boolean;
}

const DEFAULTS: Settings = { defaultPool: "", refresh_s: 2, showPrices: true, showChip: true };
export const SCHEMA = "@sgpu-magic/labextension:panel";

/** The user's settings; the defaults until they are read, and where nothing keeps any. */
export class PanelSettings {
  current: Settings = DEFAULTS;
  private readonly callbacks = new Set<() => void>();

  /** Returns how to stop being called. */
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

  /** Reads settings as they are written; what is none keeps its default. */
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
