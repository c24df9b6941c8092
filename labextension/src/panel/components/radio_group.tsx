import type { ComponentChildren } from "preact";
import { useRef } from "preact/hooks";

export interface RadioOption<T> {
  readonly value: T;
  readonly label: string;
  /** Why the option can't be chosen, "" if it can. */
  readonly reason: string;
  readonly children: ComponentChildren;
  readonly class?: string;
}

interface Props<T> {
  readonly label: string;
  readonly class: string;
  readonly value: T | null;
  readonly options: readonly RadioOption<T>[];
  readonly onChange: (value: T) => void;
}

const STEPS: Readonly<Record<string, number>> = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

/** Buttons of which one is chosen. Tab focuses the chosen one; the arrow keys choose another. */
export function RadioGroup<T extends string | number>({ label, class: name, value, options, onChange }: Props<T>) {
  const box = useRef<HTMLDivElement>(null);
  const enabled = options.filter(({ reason }) => reason === "");
  const chosen = enabled.find((option) => option.value === value);
  const first = (chosen ?? enabled[0])?.value;
  const onKey = (event: KeyboardEvent) => {
    const step = STEPS[event.key];
    if (step === undefined || event.ctrlKey || event.metaKey || event.altKey || enabled.length === 0) return;
    event.preventDefault();
    // start at the focused button, because none may be chosen yet
    const focused = (event.target as HTMLElement).dataset["value"];
    const at = enabled.findIndex((option) => String(option.value) === focused);
    const next = enabled[(at + step + enabled.length) % enabled.length];
    if (!next) return;
    onChange(next.value);
    [...(box.current?.querySelectorAll<HTMLElement>("[role=radio]") ?? [])]
      .find((element) => element.dataset["value"] === String(next.value))
      ?.focus();
  };
  return (
    <div ref={box} class={name} role="radiogroup" aria-label={label} onKeyDown={onKey}>
      {options.map((option) => (
        <button
          key={option.value}
          type="button"
          role="radio"
          class={option.class ?? ""}
          data-value={option.value}
          aria-label={option.reason ? `${option.label}: ${option.reason}` : option.label}
          aria-checked={option.value === value}
          aria-disabled={option.reason !== ""}
          title={option.reason || undefined}
          tabIndex={option.value === first ? 0 : -1}
          onClick={() => option.reason === "" && onChange(option.value)}
        >
          {option.children}
        </button>
      ))}
    </div>
  );
}
