import type { IStateDB } from "@jupyterlab/statedb";
import { describe, expect, it, vi } from "vitest";

import { PanelStorage } from "../src/plugin/panel_storage";
import { PanelSettings } from "../src/plugin/panel_settings";

describe("PanelSettings", () => {
  it("uses the user's values, and defaults for invalid ones", () => {
    const settings = new PanelSettings();
    const changed = vi.fn();
    const stop = settings.onChange(changed);
    settings.apply({ defaultPool: " team ", refreshSeconds: 5, showPrices: false, showChip: false, notifyRunEnd: true });
    expect(settings.current).toEqual({
      defaultPool: "team",
      refresh_s: 5,
      showPrices: false,
      showChip: false,
      notifyRunEnd: true,
    });
    settings.apply({ defaultPool: 7, refreshSeconds: 0, showPrices: "no", notifyRunEnd: "yes" });
    expect(settings.current).toEqual({
      defaultPool: "",
      refresh_s: 2,
      showPrices: true,
      showChip: true,
      notifyRunEnd: false,
    });
    expect(changed).toHaveBeenCalledTimes(2);
    stop();
    settings.apply({});
    expect(changed).toHaveBeenCalledTimes(2);
  });

  it("has the defaults without a settings registry", async () => {
    const settings = new PanelSettings();
    await settings.load(null);
    expect(settings.current.showChip).toBe(true);
  });
});

describe("PanelStorage", () => {
  it("is stored with the layout", async () => {
    const saved = new Map<string, unknown>([["sgpu-magic:panel", { filter: "mine", broken: 7 }]]);
    const state = {
      fetch: (key: string) => Promise.resolve(saved.get(key)),
      save: (key: string, value: unknown) => Promise.resolve(void saved.set(key, value)),
    } as unknown as IStateDB;
    const memory = new PanelStorage(state);
    await memory.load();
    expect([memory.get("filter"), memory.get("broken"), memory.get("other")]).toEqual(["mine", null, null]);
    memory.set("other", "closed");
    expect(saved.get("sgpu-magic:panel")).toEqual({ filter: "mine", other: "closed" });
  });

  it("lasts as long as the page without a state database", async () => {
    const memory = new PanelStorage(null);
    await memory.load();
    memory.set("filter", "all");
    expect(memory.get("filter")).toBe("all");
  });
});
