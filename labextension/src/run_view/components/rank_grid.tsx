import { Fragment } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import type { RankCard } from "../messages";
import { Details } from "./details";
import { ProgressBar } from "./bar";
import { Icon } from "./icon";
import { Sparkline } from "./sparkline";

/** Minimum number of ranks for small cards. */
const DENSE_FROM = 9;
/** Minimum number of ranks for a grid that scrolls. */
const SCROLL_FROM = 65;

/** Delay before the details of the card under the pointer are shown. */
const HOVER_DELAY_MS = 400;

/** States without a label, because the card's values, curve and last line show them. */
const UNLABELLED_STATES = new Set(["running", "alive"]);

interface CardProps {
  readonly card: RankCard;
  readonly dense: boolean;
  readonly isOpen: boolean;
  readonly isTabStop: boolean;
  /** Called with the hovered or focused card and the delay of its details; with null when it is left. */
  readonly onOpen: (element: HTMLElement | null, delay_ms?: number) => void;
  readonly onShow: (rank: number) => void;
}

function Card({ card, dense, isOpen, isTabStop, onOpen, onShow }: CardProps) {
  const [reading, setReading] = useState("");
  const curve = card.curves[0];
  const idle = card.idle !== "";
  const isUnlabelled = UNLABELLED_STATES.has(card.state) && card.use !== "";
  const stateLabel = isUnlabelled ? "" : card.state;
  const stateText = idle ? "idle" : stateLabel;
  const tone = idle ? "warn" : card.tone;
  const label = `rank ${card.rank}, ${card.state}${idle ? `, idle: ${card.idle}` : ""}`;
  return (
    <div
      class={`sgpu-card${idle ? " sgpu-idle" : ""}`}
      role="listitem"
      aria-label={label}
      data-rank={card.rank}
      data-state={card.state}
      onPointerEnter={(event) => onOpen(event.currentTarget, HOVER_DELAY_MS)}
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
        {/* no tab stop, because keyboard users select a rank's lines in the log's tabs */}
        <button type="button" class="sgpu-rank" tabIndex={-1} title={`the lines of rank ${card.rank}`} onClick={() => onShow(card.rank)}>
          <span class={`sgpu-${tone}`}>
            <Icon state={idle ? "idle" : card.state} tone={tone} />
          </span>
          {!dense && <b>rank</b>} {card.rank}
        </button>
        {stateText && <span class={`sgpu-word sgpu-${tone}`}>{stateText}</span>}
        <span class={reading ? "sgpu-use sgpu-reading" : "sgpu-use"}>
          {splitParts(reading || card.use || card.label).map((text, index) => (
            <span key={index}>{index > 0 ? `\u00a0· ${text}` : text}</span>
          ))}
        </span>
      </div>
      {curve ? (
        <Sparkline curve={curve} label={`${curve.name} of rank ${card.rank}`} warn={idle} isTabStop={isTabStop} onRead={setReading} />
      ) : (
        <div class="sgpu-spark" />
      )}
      <ProgressBar bar={card.bar} label={`progress of rank ${card.rank}`} />
      {card.bar ? (
        <BarText text={card.last} />
      ) : (
        <div class="sgpu-last" title={card.last}>
          {card.last}
        </div>
      )}
    </div>
  );
}

/** A progress bar's text, such as `train: 58/80 · 19.7 it/s · 1 s left`; its label is shortened before other parts are left out. */
function BarText({ text }: { text: string }) {
  const [first = "", ...others] = splitParts(text);
  const labelEnd = first.lastIndexOf(": ") + 1;
  return (
    <div class="sgpu-last sgpu-bar-text" title={text}>
      {labelEnd > 0 && <span class="sgpu-bar-label">{first.slice(0, labelEnd)}</span>}
      <span>{first.slice(labelEnd)}</span>
      {others.map((part, index) => (
        <span key={index}>{` · ${part}`}</span>
      ))}
    </div>
  );
}

/** A card for each rank with its state, values, progress and last line, and the details of the hovered or focused card. */
export function RankGrid({ ranks, onShow }: { ranks: readonly RankCard[]; onShow: (rank: number) => void }) {
  const [open, setOpen] = useState<{ rank: number; element: HTMLElement } | null>(null);
  // the only tab stop; Up and Down move between ranks
  const [tabStop, setTabStop] = useState(ranks[0]?.rank);
  const grid = useRef<HTMLDivElement>(null);
  const openTimer = useRef<ReturnType<typeof setTimeout> | undefined>(undefined);
  useEffect(() => () => clearTimeout(openTimer.current), []);
  const dense = ranks.length >= DENSE_FROM;
  const classes = ["sgpu-grid", dense ? "sgpu-dense" : "", ranks.length >= SCROLL_FROM ? "sgpu-scrolling-grid" : ""];
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
        style={evenColumns(ranks.length)}
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
              isTabStop={tabStop === card.rank}
              onOpen={(element, delay_ms = 0) => {
                clearTimeout(openTimer.current);
                const show = () => setOpen(element && { rank: card.rank, element });
                if (delay_ms > 0) openTimer.current = setTimeout(show, delay_ms);
                else show();
                if (element?.contains(document.activeElement)) setTabStop(card.rank);
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

/** Splits a text into parts; a narrow card hides the last ones. */
function splitParts(text: string): string[] {
  return text.split(" · ");
}

function columns(ranks: number): number {
  return ranks >= DENSE_FROM ? 8 : Math.min(Math.max(ranks, 1), 4);
}

/** Returns the number of columns of an output that is too narrow for four cards. */
function narrowColumns(ranks: number): number {
  if (ranks === 4) return 2;
  return ranks <= 6 ? Math.min(columns(ranks), 3) : columns(ranks);
}

/** Returns custom properties with the number of columns for an output that has room for 4, 5, ... 8 cards in a row: rows of equal length. */
function evenColumns(ranks: number): Record<string, number> {
  const most = [4, 5, 6, 7, 8];
  return Object.fromEntries(most.map((room) => [`--columns-${room}`, Math.ceil(ranks / Math.ceil(ranks / room))]));
}
