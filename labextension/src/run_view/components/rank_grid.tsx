import { Fragment } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import type { RankCard } from "../messages";
import { Details } from "./details";
import { ProgressBar } from "./bar";
import { Icon } from "./icon";
import { Sparkline } from "./sparkline";

/** From this many ranks on the cards are small, eight in a row. */
export const DENSE_FROM = 9;
/** From this many ranks on the grid scrolls. */
export const SCROLL_FROM = 65;

/** How long the pointer rests on a card before its details are shown. */
const REST_MS = 400;

/** States that need no label, because the card's curve and use show them. */
const SAID_BY_USE = new Set(["running", "alive"]);

interface CardProps {
  readonly card: RankCard;
  readonly dense: boolean;
  readonly isOpen: boolean;
  readonly isStop: boolean;
  /** Receives the card under the pointer or the focus, and the delay of its details; null when it left. */
  readonly onOpen: (element: HTMLElement | null, delay_ms?: number) => void;
  readonly onShow: (rank: number) => void;
}

function Card({ card, dense, isOpen, isStop, onOpen, onShow }: CardProps) {
  const [reading, setReading] = useState("");
  const curve = card.curves[0];
  const idle = card.idle !== "";
  // a running rank is recognized by its use, curve and last line; any other state is labelled
  const word = idle ? "idle" : SAID_BY_USE.has(card.state) && card.use ? "" : card.state;
  const tone = idle ? "warn" : card.tone;
  const labelled = `rank ${card.rank}, ${card.state}${idle ? `, idle: ${card.idle}` : ""}`;
  return (
    <div
      class={`sgpu-card${idle ? " sgpu-idle" : ""}`}
      role="listitem"
      aria-label={labelled}
      data-rank={card.rank}
      data-state={card.state}
      onPointerEnter={(event) => onOpen(event.currentTarget, REST_MS)}
      onPointerLeave={() => onOpen(null)}
      onFocusCapture={(event) => onOpen(event.currentTarget)}
      onBlurCapture={() => onOpen(null)}
      onKeyDown={(event) => {
        if (event.key === "Escape" && isOpen) {
          event.stopPropagation();
          onOpen(null);
        }
      }}
    >
      <div class="sgpu-card-head">
        {/* no tab stop: the keyboard reaches a rank's lines by the log's tabs */}
        <button type="button" class="sgpu-rank" tabIndex={-1} title={`the lines of rank ${card.rank}`} onClick={() => onShow(card.rank)}>
          <span class={`sgpu-${tone}`}>
            <Icon state={idle ? "idle" : card.state} tone={tone} />
          </span>
          {!dense && <b>rank</b>} {card.rank}
        </button>
        {word && <span class={`sgpu-word sgpu-${tone}`}>{word}</span>}
        <span class="sgpu-use">
          {parts(reading || card.use || card.label).map((text, index) => (
            <span key={index}>{index > 0 ? `\u00a0· ${text}` : text}</span>
          ))}
        </span>
      </div>
      {curve ? (
        <Sparkline curve={curve} label={`${curve.name} of rank ${card.rank}`} warn={idle} isStop={isStop} onRead={setReading} />
      ) : (
        <div class="sgpu-spark" />
      )}
      <ProgressBar bar={card.bar} label={`progress of rank ${card.rank}`} />
      <div class="sgpu-last" title={card.last}>
        {card.last}
      </div>
    </div>
  );
}

/** All ranks: state, use, progress, last line; details of the one under the pointer or the focus. */
export function RankGrid({ ranks, onShow }: { ranks: readonly RankCard[]; onShow: (rank: number) => void }) {
  const [open, setOpen] = useState<{ rank: number; element: HTMLElement } | null>(null);
  // a single tab stop for all ranks: Up and Down move between them
  const [stop, setStop] = useState(ranks[0]?.rank);
  const grid = useRef<HTMLDivElement>(null);
  const opening = useRef<ReturnType<typeof setTimeout> | undefined>(undefined);
  useEffect(() => () => clearTimeout(opening.current), []);
  const dense = ranks.length >= DENSE_FROM;
  const classes = ["sgpu-grid", dense ? "sgpu-dense" : "", ranks.length >= SCROLL_FROM ? "sgpu-scrolls" : ""];
  const onKey = (event: KeyboardEvent) => {
    const by = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    const curves = [...(grid.current?.querySelectorAll<SVGElement>("svg[tabindex]") ?? [])];
    const at = curves.findIndex((each) => each === document.activeElement);
    const to = by === undefined || at < 0 ? undefined : curves[at + by];
    if (!to) return;
    event.preventDefault();
    to.focus();
  };
  const shown = open && ranks.find(({ rank }) => rank === open.rank);
  return (
    <div class="sgpu-grid-box">
      <div
        class={classes.join(" ").trim()}
        role="list"
        aria-label="ranks"
        data-columns={columns(ranks.length)}
        data-narrow={narrowColumns(ranks.length)}
        ref={grid}
        onKeyDown={onKey}
      >
        {ranks.map((card) => (
          <Fragment key={card.rank}>
            {card.host && (
              <div class="sgpu-host" role="presentation">
                {card.host}
              </div>
            )}
            <Card
              card={card}
              dense={dense}
              isOpen={open?.rank === card.rank}
              isStop={stop === card.rank}
              onOpen={(element, delay_ms = 0) => {
                clearTimeout(opening.current);
                const show = () => setOpen(element && { rank: card.rank, element });
                if (delay_ms > 0) opening.current = setTimeout(show, delay_ms);
                else show();
                if (element?.contains(document.activeElement)) setStop(card.rank);
              }}
              onShow={onShow}
            />
          </Fragment>
        ))}
      </div>
      {shown && <Details card={shown} beside={open.element} />}
    </div>
  );
}

/** Splits a text into parts; a narrow card leaves out the last ones. */
function parts(text: string): string[] {
  return text.split(" · ");
}

function columns(ranks: number): number {
  return ranks >= DENSE_FROM ? 8 : Math.min(Math.max(ranks, 1), 4);
}

/** The number of columns where four cards do not fit side by side. */
function narrowColumns(ranks: number): number {
  return ranks === 4 ? 2 : ranks <= 6 ? Math.min(columns(ranks), 3) : columns(ranks);
}
