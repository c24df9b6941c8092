import { pieces } from "../ansi";
import type { Piece } from "../ansi";
import type { LineRow } from "../messages";

/** Longer lines are drawn cut off; the stored log has the whole line. */
const MAX_DRAWN_CHARS = 4_000;

const cachedPieces = new WeakMap<LineRow, readonly Piece[]>();

function piecesOf(row: LineRow): readonly Piece[] {
  let linePieces = cachedPieces.get(row);
  if (!linePieces) {
    const cut = row[2].length - MAX_DRAWN_CHARS;
    linePieces = pieces(cut > 0 ? row[2].slice(0, MAX_DRAWN_CHARS) : row[2]);
    if (cut > 0) linePieces = [...linePieces, { text: ` ... ${cut} more characters in the log`, style: { opacity: ".55" } }];
    cachedPieces.set(row, linePieces);
  }
  return linePieces;
}

/** Returns the width of a drawn line, in characters. */
export function widthOf(row: LineRow): number {
  return piecesOf(row).reduce((sum, { text }) => sum + text.length, 0);
}

/** Splits pieces at the ends of each match of `query`, so that a match across colours is marked as a whole. */
export function markMatches(linePieces: readonly Piece[], query: string): (Piece & { isMatch: boolean })[] {
  const whole = linePieces.map(({ text }) => text).join("").toLowerCase();
  const needle = query.toLowerCase();
  const split: (Piece & { isMatch: boolean })[] = [];
  let offset = 0;
  let match = whole.indexOf(needle);
  for (const piece of linePieces) {
    let at = 0;
    while (at < piece.text.length) {
      const position = offset + at;
      if (match >= 0 && position >= match + needle.length) match = whole.indexOf(needle, match + needle.length);
      const isMatch = match >= 0 && position >= match;
      const border = isMatch ? match + needle.length : match;
      const end = match < 0 ? piece.text.length : Math.min(piece.text.length, border - offset);
      split.push({ text: piece.text.slice(at, end), style: piece.style, isMatch });
      at = end;
    }
    offset += piece.text.length;
  }
  return split;
}

interface Props {
  readonly row: LineRow | undefined;
  /** Width of the rank label before the line, in characters; 0 for no label. */
  readonly label: number;
  readonly query: string;
  readonly isCurrent: boolean;
}

/** One line of the log. */
export function LogRow({ row, label, query, isCurrent }: Props) {
  if (!row) return <div class="sgpu-row sgpu-hole">...</div>;
  const linePieces = piecesOf(row);
  const parts = query ? markMatches(linePieces, query) : linePieces.map((piece) => ({ ...piece, isMatch: false }));
  return (
    <div class={`sgpu-row${row[3] ? " sgpu-stderr" : ""}${isCurrent ? " sgpu-current" : ""}`}>
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
