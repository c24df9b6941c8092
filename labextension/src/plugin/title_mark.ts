const MARK = "● ";

/** A mark before the page's title in the browser's tab. It is restored when the application changes the title. */
export class TitleMark {
  private readonly observer = new MutationObserver(() => this.apply());
  private isShown = false;

  show(): void {
    if (this.isShown) return;
    this.isShown = true;
    this.observer.observe(document.head, { childList: true, characterData: true, subtree: true });
    this.apply();
  }

  clear(): void {
    if (!this.isShown) return;
    this.isShown = false;
    this.observer.disconnect();
    if (document.title.startsWith(MARK)) document.title = document.title.slice(MARK.length);
  }

  private apply(): void {
    if (this.isShown && !document.title.startsWith(MARK)) document.title = MARK + document.title;
  }
}
