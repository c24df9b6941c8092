/** Copies a text; returns false if the browser does not allow it. */
export async function copyText(text: string): Promise<boolean> {
  // undefined on insecure pages, such as notebooks served over plain http from another machine
  const clipboard = navigator.clipboard as Clipboard | undefined;
  if (clipboard) {
    try {
      await clipboard.writeText(text);
      return true;
    } catch {
      // denied without a recent click; `execCommand` may still be allowed
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
