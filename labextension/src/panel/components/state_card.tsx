import type { ComponentChildren } from "preact";

interface Props {
  readonly title: string;
  readonly text?: string;
  readonly isBad?: boolean;
  /** Buttons for what the user can do. */
  readonly children?: ComponentChildren;
}

/** A state in place of content: a title, an explanation, and buttons. */
export function StateCard({ title, text, isBad, children }: Props) {
  return (
    <section class="sgpu-part sgpu-state-card" aria-label={title}>
      <p class={`sgpu-sentence${isBad ? " sgpu-bad" : ""}`}>{title}</p>
      {text && <p class="sgpu-soft">{text}</p>}
      {children && <div class="sgpu-row-buttons">{children}</div>}
    </section>
  );
}
