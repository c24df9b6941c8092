/**
 * Converts terminal colours in ranks' lines to styles; other escape sequences are dropped.
 *
 * The same sequences and the same colours as `sgpu_magic/views/ansi.py`, so that the live view and the output that
 * replaces it look alike. Pieces are drawn as text: nothing here makes HTML.
 */

// CSI; strings (OSC, DCS ...) with their ends; a cut-off sequence; other escapes; control characters
const SEQUENCE =
  /\x1b\[([0-?]*)[ -/]*([@-~])|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\|$)|\x1b[PX^_][^\x1b]*(?:\x1b\\|$)|\x1b\[[0-?]*[ -/]*$|\x1b[ -/]*[0-Z\\-~]|\x1b|[\x00-\x08\x0b-\x1f\x7f-\x9f]/g;
const CONTROL = /[\x00-\x08\x0b-\x1f\x7f-\x9f]/;
const SGR = /^[0-9;:]*$/;

const BASIC = [
  ...["#3e424d", "#e75c58", "#00a250", "#ba8b00", "#208ffb", "#d160c4", "#2aa5a8", "#a09c90"],
  ...["#6b7280", "#d84a4a", "#00903e", "#b27d12", "#3b82f6", "#b546a8", "#258f8f", "#a1a6b2"],
];
const LEVELS = [0, 95, 135, 175, 215, 255];

/** A piece of a line with one style. */
export interface Piece {
  readonly text: string;
  readonly style: Readonly<Record<string, string>> | undefined;
}

/** Returns a text without escape sequences and control characters. */
export function plain(text: string): string {
  return CONTROL.test(text) ? text.replace(SEQUENCE, "") : text;
}

/** Returns a line's pieces in order. */
export function pieces(text: string): Piece[] {
  if (!CONTROL.test(text)) return text ? [{ text, style: undefined }] : [];
  const found: Piece[] = [];
  const rendition = new Rendition();
  let at = 0;
  for (const match of text.matchAll(SEQUENCE)) {
    if (match.index > at) found.push({ text: text.slice(at, match.index), style: rendition.style() });
    at = match.index + match[0].length;
    if (match[2] === "m") rendition.change(match[1] ?? "");
  }
  if (at < text.length) found.push({ text: text.slice(at), style: rendition.style() });
  return found;
}

/** The current graphic rendition. */
class Rendition {
  private front = "";
  private back = "";
  private inverse = false;
  private flags = new Map<string, string>();

  style(): Record<string, string> | undefined {
    let [front, back] = [this.front, this.back];
    if (this.inverse) [front, back] = [back || "#ffffff", front || "#6b7280"];
    // this grey is readable on a page of either theme, but not on a coloured background
    if (back && (front === BASIC[7] || front === BASIC[15])) front = "#ffffff";
    if (!front && !back && this.flags.size === 0) return undefined;
    return { ...(front && { color: front }), ...(back && { background: back }), ...Object.fromEntries(this.flags) };
  }

  change(params: string): void {
    if (!SGR.test(params)) return;
    const codes = params.split(/[;:]/).map((code) => Number(code || "0"));
    for (let at = 0; at < codes.length; at++) {
      const code = codes[at] ?? 0;
      if (code !== 38 && code !== 48) {
        this.apply(code);
        continue;
      }
      const { colour, used } = extended(codes.slice(at + 1));
      at += used;
      if (code === 38) this.front = colour;
      else this.back = colour;
    }
  }

  private apply(code: number): void {
    if (code === 0) {
      this.front = this.back = "";
      this.inverse = false;
      this.flags.clear();
    } else if (code === 1) this.flags.set("font-weight", "bold");
    else if (code === 2) this.flags.set("opacity", ".65");
    else if (code === 3) this.flags.set("font-style", "italic");
    else if (code === 4) this.flags.set("text-decoration", "underline");
    else if (code === 7) this.inverse = true;
    else if (code === 9) this.flags.set("text-decoration", "line-through");
    else if (code === 22) {
      this.flags.delete("font-weight");
      this.flags.delete("opacity");
    } else if (code === 23) this.flags.delete("font-style");
    else if (code === 24 || code === 29) this.flags.delete("text-decoration");
    else if (code === 27) this.inverse = false;
    else if (code === 39) this.front = "";
    else if (code === 49) this.back = "";
    else if (code >= 30 && code <= 37) this.front = BASIC[code - 30] ?? "";
    else if (code >= 90 && code <= 97) this.front = BASIC[code - 82] ?? "";
    else if (code >= 40 && code <= 47) this.back = BASIC[code - 40] ?? "";
    else if (code >= 100 && code <= 107) this.back = BASIC[code - 92] ?? "";
  }
}

/** Returns the colour of the codes after 38 or 48, "" if unknown, and how many codes it used. */
function extended(codes: readonly number[]): { colour: string; used: number } {
  const [mode, first = 0, green = 0, blue = 0] = codes;
  if (mode === 5 && codes.length >= 2) return { colour: indexed(Math.min(first, 255)), used: 2 };
  if (mode === 2 && codes.length >= 4) return { colour: hex(first, green, blue), used: 4 };
  return { colour: "", used: codes.length };
}

function indexed(index: number): string {
  if (index < 16) return BASIC[index] ?? "";
  if (index >= 232) return hex(8 + 10 * (index - 232), 8 + 10 * (index - 232), 8 + 10 * (index - 232));
  const step = index - 16;
  return hex(LEVELS[Math.floor(step / 36)], LEVELS[Math.floor(step / 6) % 6], LEVELS[step % 6]);
}

function hex(...levels: (number | undefined)[]): string {
  return `#${levels.map((level) => Math.min(level ?? 0, 255).toString(16).padStart(2, "0")).join("")}`;
}
