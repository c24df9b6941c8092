import type { ComponentChild } from "preact";
import { render } from "preact";

import theme from "./theme.css";

interface MountOptions {
  /** The view's own styles, after the theme's. */
  css: string;
  /** Classes of the root element; among them `sgpu-root`, to which the theme applies. */
  className?: string;
  /** Put the styles into the page's head, before those of views in the page, so that they override none. */
  stylesInHead?: boolean;
}

/**
 * Draws a view into an element until `signal` aborts; then the element is as before.
 *
 * @param make: Returns what is drawn in the root element, which is in the page when it is called.
 */
export function mountView(
  el: HTMLElement,
  signal: AbortSignal,
  { css, className = "sgpu-root", stylesInHead = false }: MountOptions,
  make: (root: HTMLElement) => ComponentChild,
): void {
  const style = document.createElement("style");
  style.textContent = theme + css;
  const root = document.createElement("div");
  root.className = className;
  root.dataset["lmSuppressShortcuts"] = "true";
  (stylesInHead ? document.head : el).append(style);
  el.append(root);
  render(make(root), root);
  signal.addEventListener(
    "abort",
    () => {
      render(null, root);
      root.remove();
      style.remove();
    },
    { once: true },
  );
}
