import { useEffect, useRef, useState } from "preact/hooks";

import { formatCount } from "../../shared/units";
import type { Tab } from "../log_model";
import type { FindAnswer } from "../messages";
import { MAX_MATCHES } from "../messages";
import { errorText } from "../run_model";
import type { RunModel } from "../run_model";

/** How long typing must pause before the search starts. */
const SEARCH_DELAY_MS = 250;

interface Props {
  readonly model: RunModel;
  readonly tab: Tab;
  /** The first line in view, where the search begins. */
  readonly top: { current: number };
  readonly initialQuery: string;
  /** Whether the input gets the focus when the bar opens. */
  readonly takesFocus: boolean;
  readonly onQuery: (query: string) => void;
  readonly onLine: (line: number | null) => void;
  readonly onClose: () => void;
}

/** Searches the whole log for a text; the search runs where the log is stored. */
export function FindBar({ model, tab, top, initialQuery, takesFocus, onQuery, onLine, onClose }: Props) {
  const [text, setText] = useState(initialQuery);
  const [result, setResult] = useState<FindAnswer | null>(null);
  const [position, setPosition] = useState(0);
  const [status, setStatus] = useState("");
  const input = useRef<HTMLInputElement>(null);
  const lastSearch = useRef({ text: "", total: -1, number: 0 });

  const search = async (step: -1 | 0 | 1) => {
    const total = model.log.lines(tab).total;
    const number = lastSearch.current.number + 1;
    lastSearch.current = { text, total, number };
    onQuery(text);
    setStatus("searching");
    try {
      const answer = await model.find(text, tab);
      if (lastSearch.current.number !== number) return;
      const from = result?.matches[position];
      setResult(answer);
      setStatus("");
      const next = from === undefined || step === 0 ? answer.matches.findIndex((line) => line >= top.current) : -1;
      if (from === undefined || step === 0) goTo(answer, next >= 0 ? next : answer.matches.length - 1);
      else goTo(answer, answer.matches.indexOf(from) + step);
    } catch (error) {
      if (lastSearch.current.number === number) setStatus(errorText(error));
    }
  };
  const goTo = (answer: FindAnswer, index: number) => {
    const count = answer.matches.length;
    const to = count === 0 ? 0 : (index + count) % count;
    setPosition(to);
    onLine(answer.matches[to] ?? null);
  };
  const step = (by: -1 | 1) => {
    if (text === "") return;
    // new lines have arrived: search again from the current match
    const isOutdated = lastSearch.current.text !== text || lastSearch.current.total !== model.log.lines(tab).total;
    if (isOutdated || !result) void search(lastSearch.current.text === text ? by : 0);
    else goTo(result, position + by);
  };

  useEffect(() => {
    if (takesFocus) input.current?.focus();
  }, []);
  useEffect(() => {
    setResult(null);
    onLine(null);
    if (text === "") {
      lastSearch.current = { text: "", total: -1, number: lastSearch.current.number + 1 };
      onQuery("");
      setStatus("");
      return;
    }
    const timer = setTimeout(() => void search(0), SEARCH_DELAY_MS);
    return () => clearTimeout(timer);
  }, [text, tab]);

  const onKey = (event: KeyboardEvent) => {
    if (event.key === "Escape") onClose();
    else if (event.key === "Enter") step(event.shiftKey ? -1 : 1);
    else return;
    event.preventDefault();
    event.stopPropagation();
  };
  return (
    <div class="sgpu-find" role="search" onKeyDown={onKey}>
      <input
        ref={input}
        type="text"
        aria-label="find in the log"
        placeholder="find"
        spellcheck={false}
        value={text}
        onInput={(event) => setText(event.currentTarget.value)}
      />
      <span class="sgpu-found" role="status">
        {status || countText(result, position)}
      </span>
      <button type="button" aria-label="previous match" title="previous (Shift+Enter)" onClick={() => step(-1)}>
        ↑
      </button>
      <button type="button" aria-label="next match" title="next (Enter)" onClick={() => step(1)}>
        ↓
      </button>
      <button type="button" aria-label="close find" title="close (Escape)" onClick={onClose}>
        ×
      </button>
    </div>
  );
}

function countText(result: FindAnswer | null, index: number): string {
  if (!result) return "";
  if (result.total === 0) return "no match";
  const before = result.total - result.matches.length;
  const position = `${formatCount(before + index + 1)} of ${formatCount(result.total)}`;
  return before > 0 ? `${position} (last ${formatCount(MAX_MATCHES)})` : position;
}
