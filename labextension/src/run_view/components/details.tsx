import { useLayoutEffect, useRef, useState } from "preact/hooks";

import type { RankCard } from "../messages";
import { StaticSparkline, describe, isFlatZero } from "./sparkline";

const MARGIN_PX = 4;

interface Box {
  readonly left: number;
  readonly top: number;
  readonly width: number;
  readonly height: number;
}

/**
 * Places a card's details above the card if they fit into the output, else beside it with aligned bottom edges.
 *
 * All boxes have the same origin. The details stay inside the output, and start at its top if they are taller.
 */
export function placeDetails(card: Box, size: { width: number; height: number }, output: Box): { left: number; top: number } {
  const right = output.left + output.width - MARGIN_PX - size.width;
  const bottom = output.top + output.height - MARGIN_PX - size.height;
  const inside = (value: number, first: number, last: number) => Math.max(first, Math.min(value, last));
  const above = card.top - MARGIN_PX - size.height;
  if (above >= output.top + MARGIN_PX) {
    return { left: inside(card.left, output.left + MARGIN_PX, right), top: above };
  }
  const after = card.left + card.width + MARGIN_PX;
  const before = card.left - MARGIN_PX - size.width;
  return {
    left: inside(after <= right || before < output.left + MARGIN_PX ? after : before, output.left + MARGIN_PX, right),
    top: inside(card.top + card.height - size.height, output.top + MARGIN_PX, bottom),
  };
}

/** A tooltip with all measurements of a rank. */
export function Details({ card, beside }: { card: RankCard; beside: HTMLElement }) {
  const box = useRef<HTMLDivElement>(null);
  const [position, setPosition] = useState({ left: 0, top: 0 });
  useLayoutEffect(() => {
    const element = box.current;
    const grid = element?.parentElement?.getBoundingClientRect();
    const output = element?.closest(".sgpu-run")?.getBoundingClientRect();
    if (!element || !grid || !output) return;
    const size = { width: element.offsetWidth, height: element.offsetHeight };
    const place = placeDetails(beside.getBoundingClientRect(), size, output);
    const [left, top] = [place.left - grid.left, place.top - grid.top];
    setPosition((before) => (before.left === left && before.top === top ? before : { left, top }));
  });
  const curves = card.curves.slice(1).filter((curve) => !isFlatZero(curve));
  if (card.details.length === 0 && curves.length === 0 && !card.idle) return null;
  return (
    <div
      ref={box}
      class={`sgpu-details${curves.length > 2 ? " sgpu-wide" : ""}`}
      role="tooltip"
      style={{ left: `${position.left}px`, top: `${position.top}px` }}
    >
      <b>
        rank {card.rank} · {card.state}
        {card.label && ` · ${card.label}`}
      </b>
      {card.idle && <div class="sgpu-warn">{card.idle}</div>}
      <div class="sgpu-measured">
        <div class="sgpu-detail-lines">
          {card.details.map((text, index) => (
            <div key={index}>{text}</div>
          ))}
        </div>
        {curves.map((curve) => (
          <div class="sgpu-more" key={curve.name}>
            <span>
              {curve.name} {describe(curve, curve.values.length - 1)}
            </span>
            <StaticSparkline curve={curve} />
          </div>
        ))}
      </div>
    </div>
  );
}
