import { formatMoney } from "../../shared/units";
import { usePanel, useTranslate } from "../context";
import { CPU, withType } from "../form";
import type { PanelType } from "../messages";
import type { NotebookModel } from "../notebook_model";
import { formatMemory, formatEstimate } from "../format";
import { Gpus } from "./gpus";
import { RadioGroup } from "./radio_group";
import { Section } from "./section";

/** Selects one of the pool's device types, and the number of devices. */
export function Accelerators({ notebook }: { notebook: NotebookModel }) {
  const { pool, host } = usePanel();
  const t = useTranslate();
  const types = pool.snapshot?.types ?? [];
  const { form } = notebook;
  const isMissing = form.type !== "" && pool.snapshot !== null && !types.some(({ type }) => type === form.type);
  if (types.length === 0) return null;
  const free = (type: PanelType): string => {
    const wait = type.free > 0 ? null : (type.waits_s[0] ?? null);
    if (wait === null) return t("%1 of %2 free", type.free, type.total);
    return t("%1 of %2 free · about %3", type.free, type.total, formatEstimate(wait));
  };
  const marks = (type: PanelType): string => {
    const memory = type.memory_bytes > 0 ? [formatMemory(type.memory_bytes)] : [];
    const simulated = type.simulated ? [t("simulated")] : [];
    return [...memory, ...simulated, ...(type.reserved ? [t("reserved")] : [])].join(" · ");
  };
  const price = (type: PanelType): string => {
    if (type.price === null || !host.settings.showPrices) return "";
    const amount = formatMoney(type.price, type.currency);
    return type.type === CPU ? t("%1 / rank h", amount) : t("%1 / GPU h", amount);
  };
  const options = types.map((type) => ({
    value: type.type,
    label: [type.label, free(type), marks(type), price(type)].filter(Boolean).join(", "),
    reason: "",
    class: type.free > 0 ? "sgpu-type" : "sgpu-type sgpu-none",
    children: (
      <>
        <b>{type.label}</b>
        <span class="sgpu-free">{free(type)}</span>
        <small>{marks(type)}</small>
        <small>{price(type)}</small>
      </>
    ),
  }));
  return (
    <Section title={t("Accelerator")}>
      <RadioGroup
        label={t("Accelerator")}
        class="sgpu-types"
        value={form.type || null}
        options={options}
        onChange={(chosen) => {
          const type = types.find((each) => each.type === chosen);
          if (type) notebook.choose(withType(notebook.form, type));
        }}
      />
      {isMissing && (
        <p class="sgpu-soft sgpu-under">{t("The notebook asks for %1, which this pool does not have.", form.type.toUpperCase())}</p>
      )}
      <Gpus notebook={notebook} />
    </Section>
  );
}
