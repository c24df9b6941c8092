import type { Translate } from "../panel/host";

/** What is used of JupyterLab's translations. */
interface Texts {
  __(text: string, ...values: string[]): string;
}

/** Translates by JupyterLab's catalogues, which would take `%%distributed` for a sign that stands for `%`. */
export function translateBy(texts: Texts): Translate {
  return (text, ...values) => {
    let found = texts.__(text, ...values.map(String));
    for (const [magic] of text.matchAll(/%%[a-z_]+/g)) found = found.replaceAll(magic.slice(1), magic);
    return found;
  };
}
