import type { Translate } from "../panel/host";

/** The part of JupyterLab's translations that is used here. */
interface Texts {
  __(text: string, ...values: string[]): string;
}

/** Translates with JupyterLab's catalogues, and restores magics: in a catalogue, `%%` is an escaped `%`. */
export function translateBy(texts: Texts): Translate {
  return (text, ...values) => {
    let found = texts.__(text, ...values.map(String));
    for (const [magic] of text.matchAll(/%%[a-z_]+/g)) found = found.replaceAll(magic.slice(1), magic);
    return found;
  };
}
