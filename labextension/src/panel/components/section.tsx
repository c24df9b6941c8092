import type { ComponentChildren } from "preact";

import { useMemory, useOwnId } from "../context";

interface Props {
  readonly title: string;
  /** The key under which the host keeps whether it is folded; without one it can't be folded. */
  readonly name?: string;
  readonly open?: boolean;
  readonly children: ComponentChildren;
}

/** A part of the panel with a heading, which may fold it. */
export function Section({ title, name, open = true, children }: Props) {
  const id = useOwnId();
  const [isOpen, setOpen] = useMemory(`section ${name ?? ""}`, String(open));
  const shown = name === undefined || isOpen === "true";
  return (
    <section class="sgpu-part" aria-labelledby={id}>
      <h2 id={id}>
        {name === undefined ? (
          title
        ) : (
          <button type="button" class="sgpu-fold" aria-expanded={shown} onClick={() => setOpen(String(!shown))}>
            {title}
          </button>
        )}
      </h2>
      {shown && children}
    </section>
  );
}
