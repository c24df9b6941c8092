import type { Translate } from "../panel/host";

/** The part of JupyterLab's translation bundle that is used here. */
interface TranslationBundle {
  __(text: string, ...values: string[]): string;
}

/** Returns a translation function that restores cell magics: in JupyterLab's catalogues, `%%` is an escaped `%`. */
export function createTranslate(texts: TranslationBundle): Translate {
  return (text, ...values) => {
    let translated = texts.__(text, ...values.map(String));
    for (const [magic] of text.matchAll(/%%[a-z_]+/g)) translated = translated.replaceAll(magic.slice(1), magic);
    return translated;
  };
}
