import type { ComponentChildren } from "preact";

interface Props {
  readonly title: string;
  readonly text?: string;
  readonly isBad?: boolean;
  /** Buttons, where something can be done. */
  readonly children?: ComponentChildren;
}

/** A state in which there is nothing else to show: a sentence, what it means, and what can be done. */
export function StateCard({ title, text, isBad, children }: Props) {
  return (
    <section class="sgpu-part sgpu-state-card" aria-label={title}>
      <p class={`sgpu-sentence${isBad ? " sgpu-bad" : ""}`}>{title}</p>
      {text && <p class="sgpu-soft">{text}</p>}
      {children && <div class="sgpu-row-buttons">{children}</div>}
    </section>
  );
}
