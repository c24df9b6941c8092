/**
 * Run-time checks of messages: the declaration of a record defines both its type and its check.
 *
 * The TypeScript twins of the Python records are built from these.
 */

/** A malformed message; its text names the invalid part. */
export class BadMessage extends Error {}

/** Returns the value, typed, or throws `BadMessage` with its `path`. `strict` also rejects unknown keys. */
export type Check<T> = (value: unknown, path: string, strict: boolean) => T;

/** The type of the values that a check accepts. */
export type Of<C> = C extends Check<infer T> ? T : never;

function fail(path: string, expected: string): never {
  throw new BadMessage(`${path} is not ${expected}`);
}

export const num: Check<number> = (value, path) => (typeof value === "number" ? value : fail(path, "a number"));
export const str: Check<string> = (value, path) => (typeof value === "string" ? value : fail(path, "a text"));
export const bool: Check<boolean> = (value, path) => (typeof value === "boolean" ? value : fail(path, "true or false"));

export function oneOf<const T extends string>(...choices: readonly T[]): Check<T> {
  return (value, path) => choices.find((choice) => choice === value) ?? fail(path, `one of ${choices.join(", ")}`);
}

export function nullable<T>(check: Check<T>): Check<T | null> {
  return (value, path, strict) => (value === null ? null : check(value, path, strict));
}

export function list<T>(check: Check<T>): Check<readonly T[]> {
  return (value, path, strict) => {
    if (!Array.isArray(value)) fail(path, "a list");
    value.forEach((item, index) => check(item, `${path}[${index}]`, strict));
    return value as readonly T[];
  };
}

export function triple<A, B, C>(a: Check<A>, b: Check<B>, c: Check<C>): Check<readonly [A, B, C]> {
  return (value, path, strict) => {
    if (!Array.isArray(value) || value.length !== 3) fail(path, "a list of three");
    a(value[0], `${path}[0]`, strict);
    b(value[1], `${path}[1]`, strict);
    c(value[2], `${path}[2]`, strict);
    return value as unknown as readonly [A, B, C];
  };
}

export function quadruple<A, B, C, D>(
  a: Check<A>,
  b: Check<B>,
  c: Check<C>,
  d: Check<D>,
): Check<readonly [A, B, C, D]> {
  return (value, path, strict) => {
    if (!Array.isArray(value) || value.length !== 4) fail(path, "a list of four");
    a(value[0], `${path}[0]`, strict);
    b(value[1], `${path}[1]`, strict);
    c(value[2], `${path}[2]`, strict);
    d(value[3], `${path}[3]`, strict);
    return value as unknown as readonly [A, B, C, D];
  };
}

export function either<A, B>(a: Check<A>, b: Check<B>): Check<A | B> {
  return (value, path, strict) => {
    try {
      return a(value, path, strict);
    } catch {
      return b(value, path, strict);
    }
  };
}

type Shape = Record<string, Check<unknown>>;
type RecordOf<S extends Shape> = { readonly [K in keyof S]: Of<S[K]> };

export function record<S extends Shape>(shape: S): Check<RecordOf<S>> {
  return (value, path, strict) => {
    if (typeof value !== "object" || value === null || Array.isArray(value)) fail(path, "a record");
    const fields = value as Record<string, unknown>;
    for (const [key, check] of Object.entries(shape)) check(fields[key], `${path}.${key}`, strict);
    if (strict) {
      for (const key of Object.keys(fields)) if (!(key in shape)) fail(`${path}.${key}`, "a known key");
    }
    return value as RecordOf<S>;
  };
}

export function kinds<const T extends Record<string, Check<unknown>>>(choices: T): Check<Of<T[keyof T]>> {
  return (value, path, strict) => {
    const kind = typeof value === "object" && value !== null ? (value as { kind?: unknown }).kind : undefined;
    const check = typeof kind === "string" && Object.hasOwn(choices, kind) ? choices[kind] : undefined;
    if (!check) fail(`${path}.kind`, `one of ${Object.keys(choices).join(", ")}`);
    return check(value, path, strict) as Of<T[keyof T]>;
  };
}
