import { useLayoutEffect, useRef, useState } from "preact/hooks";

import type { RankCard } from "../messages";
import { StillSparkline, describe } from "./sparkline";

const WIDTH_PX = 300;

/** Everything that was measured on a rank, under its card and over what follows. */
export function Details({ card, beside }: { card: RankCard; beside: HTMLElement }) {
  const box = useRef<HTMLDivElement>(null);
  const [place, setPlace] = useState({ left: 0, top: 0 });
  useLayoutEffect(() => {
    const grid = box.current?.parentElement?.getBoundingClientRect();
    if (!grid) return;
    const at = beside.getBoundingClientRect();
    setPlace({
      left: Math.max(0, Math.min(at.left - grid.left, grid.width - WIDTH_PX)),
      top: at.bottom - grid.top,
    });
  }, [beside]);
  if (card.details.length === 0 && card.curves.length < 2 && !card.idle) return null;
  return (
    <div
      ref={box}
      class="sgpu-details"
      role="tooltip"
      style={{ left: `${place.left}px`, top: `${place.top}px`, width: `${WIDTH_PX}px` }}
    >
      <b>
        rank {card.rank} · {card.state}
        {card.label && ` · ${card.label}`}
      </b>
      {card.idle && <div class="sgpu-warn">{card.idle}</div>}
      {card.details.map((text, index) => (
        <div key={index}>{text}</div>
      ))}
      {card.curves.slice(1).map((curve) => (
        <div class="sgpu-more" key={curve.name}>
          <span>
            {curve.name} {describe(curve, curve.values.length - 1)}
          </span>
          <StillSparkline curve={curve} />
        </div>
      ))}
    </div>
  );
}
