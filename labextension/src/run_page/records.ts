/**
 * Types and checks of the records in these modules, which document them:
 *
 * - `sgpu_magic.server.page_schema`
 *
 * Written by `scripts/front_end_records.py`.
 */

import { bool, list, nullable, num, record, str } from "../shared/checks";
import type { Of } from "../shared/checks";

export const codePart = record({ title: str, text: str });
export type CodePart = Of<typeof codePart>;

export const namedText = record({ name: str, value: str });
export type NamedText = Of<typeof namedText>;

export const pagePhase = record({ name: str, seconds: num, current: bool });
export type PagePhase = Of<typeof pagePhase>;

export const shippedName = record({ name: str, size: nullable(num) });
export type ShippedName = Of<typeof shippedName>;

export const pageChange = record({ name: str, before: str, after: str });
export type PageChange = Of<typeof pageChange>;

export const environmentChanges = record({ run: str, changes: list(pageChange) });
export type EnvironmentChanges = Of<typeof environmentChanges>;

export const pageMlflow = record({
  run_id: str,
  experiment: str,
  url: str,
  command: str,
  install: str,
  can_start: bool,
  pool: str,
});
export type PageMlflow = Of<typeof pageMlflow>;

export const mlflowAddress = record({ url: str, port: num, host: str });
export type MlflowAddress = Of<typeof mlflowAddress>;

export const runPage = record({
  run_id: str,
  name: str,
  kind: str,
  state: str,
  magic_line: str,
  code: list(codePart),
  options: list(namedText),
  parameters: list(namedText),
  metrics: list(namedText),
  devices: list(str),
  submitted_at: num,
  started_at: nullable(num),
  phases: list(pagePhase),
  shipped: list(shippedName),
  shipped_bytes: num,
  cost: str,
  mlflow: nullable(pageMlflow),
  environment: nullable(environmentChanges),
});
export type RunPage = Of<typeof runPage>;

export const pageFile = record({ name: str, size: num, changed_at: num });
export type PageFile = Of<typeof pageFile>;

export const pageFiles = record({ files: list(pageFile), more: bool, cwd: str });
export type PageFiles = Of<typeof pageFiles>;
