import type { ComponentChildren } from "preact";

import { useStored, usePanelId } from "../context";

interface Props {
  readonly title: string;
  /** Key under which the host stores whether the section is collapsed. A section without one can't be collapsed. */
  readonly name?: string;
  readonly open?: boolean;
  readonly children: ComponentChildren;
}

/** A part of the panel with a heading. If it has a `name`, the heading collapses and expands it. */
export function Section({ title, name, open = true, children }: Props) {
  const id = usePanelId();
  const [isOpen, setOpen] = useStored(`section ${name ?? ""}`, String(open));
  const shown = name === undefined || isOpen === "true";
  return (
    <section class="sgpu-part" aria-labelledby={id}>
      <h2 id={id}>
        {name === undefined ? (
          title
        ) : (
          <button type="button" class="sgpu-folds" aria-expanded={shown} onClick={() => setOpen(String(!shown))}>
            {title}
          </button>
        )}
      </h2>
      {shown && children}
    </section>
  );
}
