/** Browsers draw taller elements incorrectly (Firefox's limit is 17.9 M px). */
export const MAX_HEIGHT_PX = 10_000_000;

/**
 * Maps scroll positions to lines of one height, for any number of lines.
 *
 * Up to `MAX_HEIGHT_PX` the scrolled height is the lines' height. Above it, a drag of the scroll bar moves the lines in
 * proportion, while a wheel or key event moves them by its own pixels: the position among the lines is kept separately
 * from the scroll bar's, and `alignScrollBar` aligns the two when scrolling has paused.
 */
export class ScrollMap {
  private lines = 0;
  private view_px = 0;
  private top_px = 0;
  private bar_px = 0;

  constructor(readonly row_px: number) {}

  /** Height of all lines. */
  private get full_px(): number {
    return this.lines * this.row_px;
  }

  /** Height of the scrolled element. */
  get height_px(): number {
    return Math.min(this.full_px, MAX_HEIGHT_PX);
  }

  /** Position of the scroll bar. */
  get scroll_px(): number {
    return this.bar_px;
  }

  /** The first line that is fully in view. */
  get topLine(): number {
    return Math.ceil(this.top_px / this.row_px);
  }

  get atEnd(): boolean {
    return this.top_px >= this.maxTop_px - this.row_px / 2;
  }

  private get maxTop_px(): number {
    return Math.max(0, this.full_px - this.view_px);
  }

  private get maxBar_px(): number {
    return Math.max(0, this.height_px - this.view_px);
  }

  private get isScaled(): boolean {
    return this.full_px > MAX_HEIGHT_PX;
  }

  /** Sets the number of lines and the view's height; the lines in view stay. */
  resize(lines: number, view_px: number): void {
    this.lines = lines;
    this.view_px = view_px;
    this.top_px = Math.min(this.top_px, this.maxTop_px);
    this.bar_px = this.isScaled ? Math.min(this.bar_px, this.maxBar_px) : this.top_px;
  }

  /** Applies a scroll position that the browser reports. */
  onScroll(scroll_px: number): void {
    const by = scroll_px - this.bar_px;
    this.bar_px = Math.max(0, Math.min(scroll_px, this.maxBar_px));
    if (!this.isScaled) this.top_px = this.bar_px;
    else if (this.bar_px <= 0) this.top_px = 0;
    else if (this.bar_px >= this.maxBar_px - 1) this.top_px = this.maxTop_px;
    else if (Math.abs(by) <= 2 * this.view_px) this.top_px = this.clamp(this.top_px + by);
    else this.top_px = this.clamp((this.bar_px / this.maxBar_px) * this.maxTop_px);
  }

  /** Moves the scroll bar to match the lines in view; true when it moved. */
  alignScrollBar(): boolean {
    const to = this.isScaled ? Math.round((this.top_px / this.maxTop_px) * this.maxBar_px) : this.top_px;
    const moved = Math.abs(to - this.bar_px) >= 1;
    if (moved) this.bar_px = to;
    return moved;
  }

  scrollToEnd(): void {
    this.top_px = this.maxTop_px;
    this.bar_px = this.maxBar_px;
  }

  /** Moves by lines and pages; a page is one line less than the view. */
  scrollBy(lines: number, pages: number): void {
    const page_px = Math.max(this.row_px, this.view_px - this.row_px);
    this.top_px = this.clamp(this.top_px + lines * this.row_px + pages * page_px);
    this.alignScrollBar();
  }

  /** Scrolls a line to the middle of the view, unless it is already in view. */
  scrollToLine(line: number): void {
    const at = line * this.row_px;
    if (at >= this.top_px && at + this.row_px <= this.top_px + this.view_px) return;
    this.top_px = this.clamp(at - (this.view_px - this.row_px) / 2);
    this.alignScrollBar();
  }

  /** The first line to draw and how many, with `beyond` more on each side, which avoids blank flashes. */
  range(beyond: number): { first: number; count: number } {
    const first = Math.max(0, Math.floor(this.top_px / this.row_px) - beyond);
    const end = Math.min(this.lines, Math.ceil((this.top_px + this.view_px) / this.row_px) + beyond);
    return { first, count: Math.max(0, end - first) };
  }

  /** Where a line is drawn within the scrolled height. */
  lineTop_px(line: number): number {
    return this.bar_px + line * this.row_px - this.top_px;
  }

  private clamp(top_px: number): number {
    return Math.max(0, Math.min(top_px, this.maxTop_px));
  }
}
