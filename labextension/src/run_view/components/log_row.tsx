import { pieces } from "../ansi";
import type { Piece } from "../ansi";
import type { LineRow } from "../messages";

/** Longer lines are cut when drawn; the log has them whole. */
const MAX_DRAWN = 4_000;

const drawn = new WeakMap<LineRow, readonly Piece[]>();

function piecesOf(row: LineRow): readonly Piece[] {
  let found = drawn.get(row);
  if (!found) {
    const cut = row[2].length - MAX_DRAWN;
    found = pieces(cut > 0 ? row[2].slice(0, MAX_DRAWN) : row[2]);
    if (cut > 0) found = [...found, { text: ` ... ${cut} more characters in the log`, style: { opacity: ".55" } }];
    drawn.set(row, found);
  }
  return found;
}

/** Characters that a line takes when drawn. */
export function widthOf(row: LineRow): number {
  return piecesOf(row).reduce((sum, { text }) => sum + text.length, 0);
}

/** Splits pieces where `query` begins and ends, so that a match across colours is marked whole. */
export function marked(found: readonly Piece[], query: string): (Piece & { isMatch: boolean })[] {
  const whole = found.map(({ text }) => text).join("").toLowerCase();
  const needle = query.toLowerCase();
  const split: (Piece & { isMatch: boolean })[] = [];
  let offset = 0;
  let match = whole.indexOf(needle);
  for (const piece of found) {
    let at = 0;
    while (at < piece.text.length) {
      const position = offset + at;
      if (match >= 0 && position >= match + needle.length) match = whole.indexOf(needle, match + needle.length);
      const isMatch = match >= 0 && position >= match;
      const border = match < 0 ? Infinity : isMatch ? match + needle.length : match;
      const end = Math.min(piece.text.length, border - offset);
      split.push({ text: piece.text.slice(at, end), style: piece.style, isMatch });
      at = end;
    }
    offset += piece.text.length;
  }
  return split;
}

interface Props {
  readonly row: LineRow | undefined;
  /** Width of the rank before the line, in characters; 0 draws none. */
  readonly label: number;
  readonly query: string;
  readonly isCurrent: boolean;
}

/** One line of the log. */
export function LogRow({ row, label, query, isCurrent }: Props) {
  if (!row) return <div class="sgpu-row sgpu-hole">...</div>;
  const found = piecesOf(row);
  const parts = query ? marked(found, query) : found.map((piece) => ({ ...piece, isMatch: false }));
  return (
    <div class={`sgpu-row${isCurrent ? " sgpu-current" : ""}`}>
      {label > 0 && (
        <span class="sgpu-label" style={{ minWidth: `${label}ch` }}>
          [{row[0]}]
        </span>
      )}
      {parts.map((part, index) => {
        if (part.isMatch) return <mark key={index}>{part.text}</mark>;
        return part.style ? (
          <span key={index} style={part.style}>
            {part.text}
          </span>
        ) : (
          part.text
        );
      })}
    </div>
  );
}
