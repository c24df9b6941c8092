import { MAX_LINES, isSkip } from "./messages";
import type { LineRow, LinesAnswer, NewLines } from "./messages";

export const PAGE_LINES = 200;
/** Maximum of cached pages for the lines of all ranks, and for each rank's. */
export const ALL_PAGES = 50;
export const RANK_PAGES = 6;
/** Maximum of cached characters per list of lines, because lines may be long. */
export const MAX_CHARS = 8_000_000;
/** Delay before lines are requested again after a failure. */
export const RETRY_MS = 5_000;

/** Lines of all ranks in order of arrival, or of one rank. */
export type Tab = number | "all";

interface Page {
  readonly rows: (LineRow | undefined)[];
  chars: number;
}

/** A cache of a log's lines, in pages; the least recently used pages are evicted first. */
export class PagedLines {
  total = 0;
  private readonly pages = new Map<number, Page>();
  private chars = 0;

  constructor(private readonly maxPages: number) {}

  get pageCount(): number {
    return this.pages.size;
  }

  get(line: number): LineRow | undefined {
    return this.pages.get(Math.floor(line / PAGE_LINES))?.rows[line % PAGE_LINES];
  }

  put(line: number, row: LineRow): void {
    const number = Math.floor(line / PAGE_LINES);
    const page = this.pages.get(number) ?? this.addPage(number);
    const before = page.rows[line % PAGE_LINES];
    const grown = row[2].length - (before ? before[2].length : 0);
    page.rows[line % PAGE_LINES] = row;
    page.chars += grown;
    this.chars += grown;
    if (this.chars > MAX_CHARS) this.evict();
  }

  /** Marks lines as recently used. */
  touch(first: number, count: number): void {
    for (let number = Math.floor(first / PAGE_LINES); number * PAGE_LINES < first + count; number++) {
      const page = this.pages.get(number);
      if (!page) continue;
      this.pages.delete(number);
      this.pages.set(number, page);
    }
  }

  private addPage(number: number): Page {
    const page: Page = { rows: [], chars: 0 };
    this.pages.set(number, page);
    this.evict();
    return page;
  }

  private evict(): void {
    for (const [number, page] of this.pages) {
      // keep two pages, however long their lines: the view may span both
      const tooMany = this.pages.size > this.maxPages || (this.chars > MAX_CHARS && this.pages.size > 2);
      if (!tooMany) return;
      this.pages.delete(number);
      this.chars -= page.chars;
    }
  }
}

/** Requests lines; resolves with null if there is no answer. */
export type FetchLines = (first: number, count: number, rank: number | null) => Promise<LinesAnswer | null>;

/**
 * The browser's copy of a run's log: its length, and some pages of its lines.
 *
 * Lines have absolute numbers, so messages may arrive late, twice or never. Missing lines are requested when they are
 * in view.
 */
export class LogModel {
  /** Number of the last `NewLines` that was applied. */
  seq = 0;
  private readonly all = new PagedLines(ALL_PAGES);
  private readonly ranks: PagedLines[] = [];
  /** When each requested page may be requested again; `Infinity` while its request is pending. */
  private readonly retryAt_ms = new Map<string, number>();

  constructor(
    private readonly fetch: FetchLines,
    private readonly onChange: () => void,
    private readonly now_ms: () => number = () => performance.now(),
  ) {}

  lines(tab: Tab): PagedLines {
    if (tab === "all") return this.all;
    return (this.ranks[tab] ??= new PagedLines(RANK_PAGES));
  }

  /** Updates the length of each rank's log; a length never shrinks. */
  grow(ranks: readonly number[]): void {
    ranks.forEach((total, rank) => {
      const lines = this.lines(rank);
      lines.total = Math.max(lines.total, total);
    });
    this.all.total = Math.max(this.all.total, ranks.reduce((sum, total) => sum + total, 0));
    this.onChange();
  }

  /** Applies the reply to a hello. */
  onHello(seq: number, ranks: readonly number[]): void {
    this.seq = Math.max(this.seq, seq);
    this.grow(ranks);
  }

  /** Adds new lines; false when messages before this one are missing. */
  add(message: NewLines): boolean {
    if (message.seq <= this.seq) return true;
    const isNext = message.seq === this.seq + 1;
    this.seq = message.seq;
    let at = message.first;
    for (const row of message.rows) {
      if (isSkip(row)) {
        at += row[2];
        continue;
      }
      this.all.put(at, row);
      this.lines(row[0]).put(row[1], row);
      at += 1;
    }
    this.all.total = Math.max(this.all.total, at);
    this.grow(message.ranks);
    return isNext;
  }

  /** Requests the missing lines in view, page by page, once each. */
  requestMissing(tab: Tab, first: number, count: number): void {
    const lines = this.lines(tab);
    lines.touch(first, count);
    const end = Math.min(first + count, lines.total);
    for (let line = first; line < end; line++) {
      if (lines.get(line)) continue;
      const page = Math.floor(line / PAGE_LINES);
      const pageEnd = Math.min((page + 1) * PAGE_LINES, lines.total);
      if (!this.isRequested(tab, page)) this.requestPage(tab, page, line, pageEnd);
      line = pageEnd - 1;
    }
  }

  private isRequested(tab: Tab, page: number): boolean {
    const retryAt_ms = this.retryAt_ms.get(`${tab}:${page}`);
    return retryAt_ms !== undefined && this.now_ms() < retryAt_ms;
  }

  private requestPage(tab: Tab, page: number, line: number, pageEnd: number): void {
    const key = `${tab}:${page}`;
    const lines = this.lines(tab);
    // start at the page's first missing line: the lines above the view are likely to be needed next
    let first = page * PAGE_LINES;
    while (first < line && lines.get(first)) first++;
    this.retryAt_ms.set(key, Infinity);
    this.fetch(first, Math.min(pageEnd - first, MAX_LINES), tab === "all" ? null : tab).then(
      (answer) => {
        if (answer && answer.rows.length > 0) {
          this.retryAt_ms.delete(key);
          this.addAnswer(tab, answer);
        } else {
          this.retryAt_ms.set(key, this.now_ms() + RETRY_MS);
        }
        this.onChange();
      },
      () => {
        this.retryAt_ms.set(key, this.now_ms() + RETRY_MS);
        this.onChange();
      },
    );
  }

  private addAnswer(tab: Tab, answer: LinesAnswer): void {
    const lines = this.lines(tab);
    answer.rows.forEach((row, index) => lines.put(answer.first + index, row));
    lines.total = Math.max(lines.total, answer.total);
  }
}
