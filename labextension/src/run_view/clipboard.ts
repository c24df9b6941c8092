/** Copies a text; false when the browser does not let a page do that. */
export async function copyText(text: string): Promise<boolean> {
  // not there on pages that come over plain http from another machine, as many notebooks do
  const clipboard = navigator.clipboard as Clipboard | undefined;
  if (clipboard) {
    try {
      await clipboard.writeText(text);
      return true;
    } catch {
      // refused without a fresh click; the older way may still be allowed
    }
  }
  const area = document.createElement("textarea");
  area.value = text;
  area.style.cssText = "position:fixed;top:0;opacity:0";
  document.body.append(area);
  area.select();
  try {
    // eslint-disable-next-line @typescript-eslint/no-deprecated -- the only way without the clipboard's interface
    return document.execCommand("copy");
  } finally {
    area.remove();
  }
}
