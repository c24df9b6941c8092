/** The form's state: a notebook's choice before it is applied. Pure functions, without rendering or messages. */
import type { Choice, PackageLine, PanelPool, PanelType } from "./messages";

export const EMPTY_CHOICE: Choice = { gpus: 0, type: "", pool: "", env_version: "", dependencies: [], removed: [] };
/** Default number of ranks on CPU. */
const CPU_RANKS = 2;
export const CPU = "cpu";

/** Returns the normalized name (PEP 503) of a requirement's distribution. */
export function canonicalName(requirement: string): string {
  const name = /^\s*[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?/.exec(requirement)?.[0] ?? requirement;
  return name.trim().replace(/[-_.]+/g, "-").toLowerCase();
}

const NAME = "[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?";
const EXTRAS = `(?:\\[\\s*${NAME}(?:\\s*,\\s*${NAME})*\\s*\\])?`;
const CLAUSE = "(?:===?|~=|!=|<=?|>=?)\\s*[A-Za-z0-9*.+!_-]+";
const VERSIONS = `(?:\\(?\\s*${CLAUSE}(?:\\s*,\\s*${CLAUSE})*\\s*\\)?)?`;
const REQUIREMENT = new RegExp(
  `^(?:${NAME})\\s*${EXTRAS}\\s*(?:@\\s*[a-z][a-z0-9+.-]*:\\/\\/\\S+|${VERSIONS})\\s*(?:;.+)?$`,
);

/** Returns what is wrong with a requirement's syntax, "" if it is valid; `%1` stands for the typed text. */
export function requirementProblem(text: string): string {
  const typed = text.trim();
  if (typed === "" || REQUIREMENT.test(typed)) return "";
  if (typed.startsWith("-")) return "Options such as %1 belong in a requirements file; name a package.";
  if (/^(?:\.{0,2}\/|~\/)/.test(typed)) return "%1 is a path; name a package, or write name @ file:///path.";
  const [name, version, more] = typed.split(/\s+/);
  if (name && version && !more && /^v?\d/.test(version)) return "%1 is not a requirement; write name==version.";
  if (/\s/.test(typed)) return "%1 is not a requirement; add one package at a time.";
  if (/^[^=<>!~]+=[^=]/.test(typed)) return "%1 is not a requirement; write two equals signs.";
  return "%1 is not a requirement; write one as peft or peft==0.17.1.";
}

/** Adds a requirement, replacing another one of the same package. */
export function withPackage(choice: Choice, requirement: string): Choice {
  const name = canonicalName(requirement);
  const others = choice.dependencies.filter((each) => canonicalName(each) !== name);
  const removed = choice.removed.filter((each) => canonicalName(each) !== name);
  return { ...choice, dependencies: [...others, requirement.trim()], removed };
}

/** Reverts a line's requirement or removal; a package that the choice does not list is added to `removed`. */
export function withoutLine(choice: Choice, line: PackageLine): Choice {
  const name = canonicalName(line.name);
  const dependencies = choice.dependencies.filter((each) => canonicalName(each) !== name);
  const removed = choice.removed.filter((each) => canonicalName(each) !== name);
  const wasChosen = dependencies.length < choice.dependencies.length || removed.length < choice.removed.length;
  return { ...choice, dependencies, removed: wasChosen ? removed : [...removed, line.name] };
}

/** A line of the environment with the form's pending change. */
export interface FormLine extends PackageLine {
  /** `added`: not in effect until the next Apply; `dropped`: in effect until the next Apply. */
  readonly pending: "" | "added" | "dropped";
}

/**
 * Returns the environment's differences from its base, with the form's pending changes.
 *
 * @param known: The kernel's list for the environment in effect.
 * @param effect: The choice in effect.
 * @param form: What the user is choosing; with another base, `known` does not apply.
 */
export function packageLines(known: readonly PackageLine[], effect: Choice, form: Choice): readonly FormLine[] {
  const lines: FormLine[] = [];
  const isSameBase = effect.env_version === form.env_version;
  const before = new Set(effect.dependencies);
  const removedBefore = new Set(effect.removed.map(canonicalName));
  const chosen = new Map(form.dependencies.map((each) => [canonicalName(each), each]));
  const removed = new Set(form.removed.map(canonicalName));
  const covered = new Set<string>();
  for (const line of isSameBase ? known : []) {
    const name = canonicalName(line.name);
    const requirement = chosen.get(name);
    if (requirement !== undefined && !before.has(requirement)) continue;
    covered.add(name);
    const wasDependency = effect.dependencies.some((each) => canonicalName(each) === name);
    const isDropped =
      (wasDependency && requirement === undefined) ||
      (removedBefore.has(name) ? !removed.has(name) : removed.has(name));
    lines.push({ ...line, pending: isDropped ? "dropped" : "" });
  }
  for (const requirement of form.dependencies) {
    if (covered.has(canonicalName(requirement))) continue;
    const isNew = !isSameBase || !before.has(requirement);
    lines.push({ sign: "+", name: canonicalName(requirement), words: requirement, removable: true, pending: isNew ? "added" : "" });
  }
  for (const name of form.removed) {
    if (covered.has(canonicalName(name))) continue;
    const isNew = !isSameBase || !removedBefore.has(canonicalName(name));
    lines.push({ sign: "-", name, words: name, removable: true, pending: isNew ? "added" : "" });
  }
  return lines;
}

/** Reverts a line's pending change. */
export function undoLine(choice: Choice, effect: Choice, line: FormLine): Choice {
  if (line.pending !== "dropped") return withoutLine(choice, line);
  const name = canonicalName(line.name);
  const own = (names: readonly string[]) => names.filter((each) => canonicalName(each) !== name);
  const before = (names: readonly string[]) => names.filter((each) => canonicalName(each) === name);
  return {
    ...choice,
    dependencies: [...own(choice.dependencies), ...before(effect.dependencies)],
    removed: [...own(choice.removed), ...before(effect.removed)],
  };
}

export function typeOf(pool: PanelPool | null, type: string): PanelType | null {
  return pool?.types.find((each) => each.type === type) ?? null;
}

/**
 * Fills in a choice's missing type and number as the pool would: all devices of its only accelerator type, or two
 * ranks if it has only CPU. With several types, one device of the cheapest, preferring types with free devices.
 */
export function resolveChoice(choice: Choice, pool: PanelPool | null): Choice {
  const accelerators = (pool?.types ?? []).filter(({ type }) => type !== CPU);
  const offered = accelerators.length > 0 ? accelerators : (pool?.types ?? []);
  const type = choice.type ? typeOf(pool, choice.type) : ([...offered].sort(compareTypes)[0] ?? null);
  if (!type) return choice;
  const defaultGpus = choice.type === "" && offered.length > 1 ? 1 : defaultNumber(type);
  return { ...choice, type: type.type, gpus: choice.gpus || defaultGpus };
}

/** Returns how many of the devices that a resolved choice requests are free; 0 if the pool does not have the type. */
export function freeDevices(choice: Choice, pool: PanelPool | null): number {
  return Math.min(choice.gpus, typeOf(pool, choice.type)?.free ?? 0);
}

/** Returns a choice with another type, keeping the number if the type has that many devices. */
export function withType(choice: Choice, type: PanelType): Choice {
  const keptGpus = choice.gpus > 0 && choice.gpus <= type.total ? choice.gpus : 0;
  return { ...choice, type: type.type, gpus: keptGpus || (type.type === CPU ? defaultNumber(type) : 1) };
}

export function sameChoice(a: Choice, b: Choice): boolean {
  return JSON.stringify(choiceKey(a)) === JSON.stringify(choiceKey(b));
}

function choiceKey(choice: Choice): unknown {
  const { gpus, type, pool, env_version, dependencies, removed } = choice;
  return [gpus, type, pool, env_version, [...dependencies].sort(), [...removed].sort()];
}

/** Orders types with free devices first, then by hourly price, then by memory. */
function compareTypes(a: PanelType, b: PanelType): number {
  const price = (type: PanelType) => type.price ?? 0;
  return Number(b.free > 0) - Number(a.free > 0) || price(a) - price(b) || a.memory_bytes - b.memory_bytes;
}

function defaultNumber(type: PanelType | null): number {
  if (!type) return 0;
  return type.type === CPU ? Math.min(CPU_RANKS, type.total) : type.total;
}
