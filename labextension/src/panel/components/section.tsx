import type { ComponentChildren } from "preact";

import { useMemory, useOwnId } from "../context";

interface Props {
  readonly title: string;
  /** Remembers under this name whether it is closed; without one it can't be. */
  readonly name?: string;
  readonly open?: boolean;
  readonly children: ComponentChildren;
}

/** A part of the panel with its heading, which may close it. */
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
