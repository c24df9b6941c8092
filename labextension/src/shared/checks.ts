/**
 * Run-time checks of messages: the declaration of a record defines both its type and its check.
 *
 * The TypeScript twins of the Python records are built from these.
 */

/** A malformed message; the text names the invalid part. */
export class BadMessage extends Error {}

/** Returns the value, typed, or throws `BadMessage`. `strict` also rejects unknown keys. */
export type Check<T> = (value: unknown, at: string, strict: boolean) => T;

export type Of<C> = C extends Check<infer T> ? T : never;

function wrong(at: string, expected: string): never {
  throw new BadMessage(`${at} is not ${expected}`);
}

export const num: Check<number> = (value, at) => (typeof value === "number" ? value : wrong(at, "a number"));
export const str: Check<string> = (value, at) => (typeof value === "string" ? value : wrong(at, "a text"));
export const bool: Check<boolean> = (value, at) => (typeof value === "boolean" ? value : wrong(at, "true or false"));

export function oneOf<const T extends string>(...choices: readonly T[]): Check<T> {
  return (value, at) => choices.find((choice) => choice === value) ?? wrong(at, `one of ${choices.join(", ")}`);
}

export function nullable<T>(check: Check<T>): Check<T | null> {
  return (value, at, strict) => (value === null ? null : check(value, at, strict));
}

export function list<T>(check: Check<T>): Check<readonly T[]> {
  return (value, at, strict) => {
    if (!Array.isArray(value)) wrong(at, "a list");
    value.forEach((item, index) => check(item, `${at}[${index}]`, strict));
    return value as readonly T[];
  };
}

export function triple<A, B, C>(a: Check<A>, b: Check<B>, c: Check<C>): Check<readonly [A, B, C]> {
  return (value, at, strict) => {
    if (!Array.isArray(value) || value.length !== 3) wrong(at, "a list of three");
    a(value[0], `${at}[0]`, strict);
    b(value[1], `${at}[1]`, strict);
    c(value[2], `${at}[2]`, strict);
    return value as unknown as readonly [A, B, C];
  };
}

export function either<A, B>(a: Check<A>, b: Check<B>): Check<A | B> {
  return (value, at, strict) => {
    try {
      return a(value, at, strict);
    } catch {
      return b(value, at, strict);
    }
  };
}

type Shape = Record<string, Check<unknown>>;
type Read<S extends Shape> = { readonly [K in keyof S]: Of<S[K]> };

export function record<S extends Shape>(shape: S): Check<Read<S>> {
  return (value, at, strict) => {
    if (typeof value !== "object" || value === null || Array.isArray(value)) wrong(at, "a record");
    const found = value as Record<string, unknown>;
    for (const [key, check] of Object.entries(shape)) check(found[key], `${at}.${key}`, strict);
    if (strict) {
      for (const key of Object.keys(found)) if (!(key in shape)) wrong(`${at}.${key}`, "a known key");
    }
    return value as Read<S>;
  };
}

export function kinds<const T extends Record<string, Check<unknown>>>(choices: T): Check<Of<T[keyof T]>> {
  return (value, at, strict) => {
    const kind = typeof value === "object" && value !== null ? (value as { kind?: unknown }).kind : undefined;
    const check = typeof kind === "string" && Object.hasOwn(choices, kind) ? choices[kind] : undefined;
    if (!check) wrong(`${at}.kind`, `one of ${Object.keys(choices).join(", ")}`);
    return check(value, at, strict) as Of<T[keyof T]>;
  };
}
