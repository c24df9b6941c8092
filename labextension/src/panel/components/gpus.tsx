import { useState } from "preact/hooks";

import { usePanelId, usePanel, useTranslate } from "../context";
import { CPU, typeOf } from "../form";
import type { Translate } from "../host";
import type { PanelType } from "../messages";
import type { NotebookModel } from "../notebook_model";
import { formatEstimate } from "../format";
import { RadioGroup } from "./radio_group";

/** Above this many devices, a number field replaces the buttons. */
const MAX_BUTTONS = 8;

/** The number of devices of the chosen type, and when that many will be free. */
export function Gpus({ notebook }: { notebook: NotebookModel }) {
  const { pool } = usePanel();
  const t = useTranslate();
  const { form } = notebook;
  const type = typeOf(pool.snapshot, form.type);
  if (!type) return null;
  const label = type.type === CPU ? t("Ranks") : t("GPUs");
  const tooMany = form.gpus > type.total ? t("this pool has %1 %2", type.total, type.label) : "";
  const choose = (gpus: number) => notebook.choose({ ...notebook.form, gpus });
  // devices of this notebook's session count as free, because the session releases them before it connects again
  const own = pool.snapshot?.devices.filter((device) => device.type === type.type && isHeldBy(device.kernel, notebook)).length ?? 0;
  const free = type.free + own;
  const numbers = Array.from({ length: type.total }, (_, index) => index + 1);
  const options = [...numbers, ...(tooMany ? [form.gpus] : [])].map((number) => ({
    value: number,
    label: number > free && number <= type.total ? `${number}, ${waitLabel(type, number, t)}` : String(number),
    reason: number > type.total ? tooMany : "",
    class: number > free ? "sgpu-later" : "",
    children: number,
  }));
  return (
    <>
      {type.total <= MAX_BUTTONS ? (
        <div class="sgpu-pair sgpu-number">
          <span aria-hidden="true">{label}</span>
          <RadioGroup label={label} class="sgpu-segments" value={form.gpus || null} options={options} onChange={choose} />
        </div>
      ) : (
        <NumberField label={label} value={form.gpus} max={type.total} onChange={choose} />
      )}
      {tooMany && <p class="sgpu-under sgpu-warn">{t("The notebook asks for %1: %2.", form.gpus, tooMany)}</p>}
      {!tooMany && form.gpus > free && <p class="sgpu-under sgpu-soft">{waitSentence(type, form.gpus, t)}</p>}
    </>
  );
}

interface FieldProps {
  readonly label: string;
  readonly value: number;
  readonly max: number;
  readonly onChange: (value: number) => void;
}

function NumberField({ label, value, max, onChange }: FieldProps) {
  const t = useTranslate();
  const id = usePanelId();
  const [typed, setTyped] = useState<string | null>(null);
  const number = Number(typed ?? value);
  const isWrong = typed !== null && (!Number.isInteger(number) || number < 1 || number > max);
  return (
    <div class="sgpu-pair sgpu-number">
      <label for={id}>{label}</label>
      <span>
        <input
          id={id}
          type="number"
          min={1}
          max={max}
          value={typed ?? (value || "")}
          aria-invalid={isWrong}
          aria-describedby={`${id}-most`}
          onInput={(event) => {
            const text = event.currentTarget.value;
            const next = Number(text);
            setTyped(text);
            if (Number.isInteger(next) && next >= 1 && next <= max) onChange(next);
          }}
          onBlur={() => setTyped(null)}
        />{" "}
        <small id={`${id}-most`} class={isWrong ? "sgpu-bad" : "sgpu-soft"}>
          {t("of %1", max)}
        </small>
      </span>
    </div>
  );
}

function waitLabel(type: PanelType, number: number, t: Translate): string {
  const wait = type.waits_s[number - 1] ?? null;
  return wait === null ? t("not free now") : t("free in about %1", formatEstimate(wait));
}

function waitSentence(type: PanelType, number: number, t: Translate): string {
  const wait = type.waits_s[number - 1] ?? null;
  const what = `${number} × ${type.label}`;
  if (wait === null) return t("%1 are not free now; when they will be free is unknown.", what);
  return t("%1 will be free in about %2, based on earlier runs.", what, formatEstimate(wait));
}

function isHeldBy(kernel: string, notebook: NotebookModel): boolean {
  return kernel !== "" && kernel === notebook.link.kernel;
}
