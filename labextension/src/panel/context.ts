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

/** An element's id: two panels in a page, each with a Preact of its own, do not know of each other. */
export function useOwnId(): string {
  return `${usePanel().id}-${useId()}`;
}

/** Redraws the component once a second while there is something in it that goes on, and returns the server's time. */
export function useNow(goesOn: boolean): number {
  const { ticker, pool } = usePanel();
  const [, redraw] = useState(0);
  useEffect(() => (goesOn ? ticker.listen(() => redraw((count) => count + 1)) : undefined), [ticker, goesOn]);
  return pool.now_s;
}

/** A word that the panel remembers over a reload. */
export function useMemory(key: string, otherwise: string): readonly [string, (value: string) => void] {
  const { memory } = usePanel().host;
  const [value, setValue] = useState(() => memory.get(key) ?? otherwise);
  const set = (next: string) => {
    setValue(next);
    memory.set(key, next);
  };
  return [value, set];
}

/** Calls back after each change of the model. */
export function useRedraw(model: PanelModel): void {
  const [, redraw] = useState(0);
  useLayoutEffect(() => model.subscribe(() => redraw((count) => count + 1)), [model]);
}
