/** A line of a diff: unchanged, removed or added. */
export interface DiffLine {
  readonly sign: " " | "-" | "+";
  readonly text: string;
}

/** Above this many pairs of lines, the part between the common start and end is shown as removed and added. */
const MAX_PAIRS = 4_000_000;

/** Returns a line diff of two texts with as few changed lines as possible. */
export function diffLines(before: string, after: string): readonly DiffLine[] {
  const [old, current] = [before.split("\n"), after.split("\n")];
  let start = 0;
  while (start < Math.min(old.length, current.length) && old[start] === current[start]) start += 1;
  let end = 0;
  const maxEnd = Math.min(old.length, current.length) - start;
  while (end < maxEnd && old[old.length - 1 - end] === current[current.length - 1 - end]) end += 1;
  const unchanged = (lines: readonly string[]): DiffLine[] => lines.map((text) => ({ sign: " ", text }));
  return [
    ...unchanged(old.slice(0, start)),
    ...diffMiddle(old.slice(start, old.length - end), current.slice(start, current.length - end)),
    ...unchanged(old.slice(old.length - end)),
  ];
}

function diffMiddle(old: readonly string[], current: readonly string[]): readonly DiffLine[] {
  const isLarge = old.length * current.length > MAX_PAIRS;
  const lengths = isLarge ? null : commonLengths(old, current);
  const lines: DiffLine[] = [];
  let [i, j] = [0, 0];
  while (lengths && i < old.length && j < current.length) {
    if (old[i] === current[j]) {
      lines.push({ sign: " ", text: old[i] ?? "" });
      i += 1;
      j += 1;
    } else if ((lengths[i + 1]?.[j] ?? 0) >= (lengths[i]?.[j + 1] ?? 0)) {
      lines.push({ sign: "-", text: old[i] ?? "" });
      i += 1;
    } else {
      lines.push({ sign: "+", text: current[j] ?? "" });
      j += 1;
    }
  }
  for (const text of old.slice(i)) lines.push({ sign: "-", text });
  for (const text of current.slice(j)) lines.push({ sign: "+", text });
  return lines;
}

/** Returns the length of the longest common subsequence of `old` from i and `current` from j, at [i][j]. */
function commonLengths(old: readonly string[], current: readonly string[]): readonly Uint32Array[] {
  const lengths = Array.from({ length: old.length + 1 }, () => new Uint32Array(current.length + 1));
  for (let i = old.length - 1; i >= 0; i--) {
    const [row, below] = [lengths[i], lengths[i + 1]];
    if (!row || !below) continue;
    for (let j = current.length - 1; j >= 0; j--) {
      row[j] = old[i] === current[j] ? (below[j + 1] ?? 0) + 1 : Math.max(below[j] ?? 0, row[j + 1] ?? 0);
    }
  }
  return lengths;
}
