/** Queries and events of a mounted view. */

/** Adds an empty element to the page. */
export function addElement(): HTMLElement {
  const el = document.createElement("div");
  document.body.append(el);
  return el;
}

/** Returns the first matching element, and throws if there is none. */
export function query(el: Element, selector: string): HTMLElement {
  const found = el.querySelector<HTMLElement>(selector);
  if (!found) throw new Error(`no ${selector} in ${el.innerHTML}`);
  return found;
}

/** Returns the button with this text or label, and throws if there is none. */
export function button(el: Element, name: string): HTMLButtonElement {
  const found = [...el.querySelectorAll("button")].find(
    (each) => each.textContent.trim() === name || each.getAttribute("aria-label") === name,
  );
  if (!found) throw new Error(`no button ${name} in ${el.textContent}`);
  return found;
}

export function press(element: Element, key: string, modifiers: KeyboardEventInit = {}): void {
  element.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true, ...modifiers }));
}

export function typeInto(element: HTMLElement, value: string): void {
  (element as HTMLInputElement).value = value;
  element.dispatchEvent(new Event("input", { bubbles: true }));
}

/** Selects an option, given the `<select>` element and the option's value. */
export function selectOption(element: HTMLElement, value: string): void {
  (element as HTMLSelectElement).value = value;
  element.dispatchEvent(new Event("change", { bubbles: true }));
}

export function setPageHidden(hidden: boolean): void {
  Object.defineProperty(document, "hidden", { configurable: true, get: () => hidden });
  document.dispatchEvent(new Event("visibilitychange"));
}
