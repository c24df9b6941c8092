import { createContext } from "preact";
import { useContext, useEffect, useId, useLayoutEffect, useState } from "preact/hooks";

import type { Translate } from "./host";
import type { PanelModel } from "./model";

export const PanelContext = createContext<PanelModel | null>(null);

export function usePanel(): PanelModel {
  const model = useContext(PanelContext);
  if (!model) throw new Error("drawn outside of the panel");
  return model;
}

export function useTranslate(): Translate {
  return usePanel().host.translate;
}

/** Returns an id for an element, unique in the page: the ids of `useId` repeat across panels. */
export function usePanelId(): string {
  return `${usePanel().id}-${useId()}`;
}

/** Redraws the component once a second while `isActive`, and returns the server's time. */
export function useNow(isActive: boolean): number {
  const { ticker, pool } = usePanel();
  const [, redraw] = useState(0);
  useEffect(() => (isActive ? ticker.subscribe(() => redraw((count) => count + 1)) : undefined), [ticker, isActive]);
  return pool.now_s;
}

/** Returns a string that the host stores for the panel, and its setter. */
export function useStored(key: string, initialValue: string): readonly [string, (value: string) => void] {
  const { storage } = usePanel().host;
  const [value, setValue] = useState(() => storage.get(key) ?? initialValue);
  const set = (next: string) => {
    setValue(next);
    storage.set(key, next);
  };
  return [value, set];
}

/** Calls back after each change of the model. */
export function useRedraw(model: PanelModel): void {
  const [, redraw] = useState(0);
  useLayoutEffect(() => model.subscribe(() => redraw((count) => count + 1)), [model]);
}
