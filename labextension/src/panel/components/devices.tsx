import { usePanel, useTranslate } from "../context";
import type { DevicePicture } from "../messages";
import { formatUsed } from "../words";
import { Section } from "./section";

/** How busy each device is, and who uses it. */
export function Devices() {
  const { pool, notebook } = usePanel();
  const t = useTranslate();
  const { picture } = pool;
  if (!picture || (picture.devices.length === 0 && picture.cpu_slots === 0 && picture.notes.length === 0)) return null;
  const kernel = notebook?.link.kernel ?? "";
  // as wide as the longest needs, so that the bars begin below one another
  const label = Math.max(...picture.devices.map((device) => device.label.length), 0);
  return (
    <Section title={t("Devices")} name="devices">
      <ul class="sgpu-devices" style={{ "--label": `max(52px, ${label}ch)` }}>
        {picture.devices.map((device) => (
          <Device key={device.uuid} device={device} isOwn={kernel !== "" && device.kernel === kernel} />
        ))}
        {picture.cpu_slots > 0 && <Slots total={picture.cpu_slots} free={picture.cpu_slots_free} />}
      </ul>
      {picture.devices.some(({ simulated }) => simulated) && (
        <p class="sgpu-soft sgpu-small">{t("Simulated devices show the CPU and memory of their ranks.")}</p>
      )}
      {picture.notes.map((note) => (
        <p key={note} class="sgpu-soft sgpu-under">
          {note}
        </p>
      ))}
    </Section>
  );
}

function Device({ device, isOwn }: { device: DevicePicture; isOwn: boolean }) {
  const t = useTranslate();
  const used = device.used_bytes === null ? "" : formatUsed(device.used_bytes);
  const use = device.utilization_pct === null ? t("not measured") : `${Math.round(device.utilization_pct)} %`;
  const user = device.free ? t("free") : device.user;
  const words = [use, used, user, isOwn ? t("this notebook's") : "", device.simulated ? t("simulated") : ""].filter(Boolean);
  return (
    <li class={`sgpu-device${isOwn ? " sgpu-own" : ""}${device.free ? " sgpu-idle" : ""}`} title={words.join(" · ")}>
      <b>{device.label}</b>
      <Track percent={device.utilization_pct ?? 0} />
      <span class="sgpu-used" aria-hidden="true">
        {used}
      </span>
      <span class="sgpu-user" aria-hidden="true">
        {user}
      </span>
      <span class="sgpu-hidden">{words.join(", ")}</span>
    </li>
  );
}

function Slots({ total, free }: { total: number; free: number }) {
  const t = useTranslate();
  const words = free === total ? t("%1 slots", total) : t("%1 of %2 slots free", free, total);
  return (
    <li class="sgpu-device sgpu-slots" title={t("%1 of %2 slots free", free, total)}>
      <b>CPU</b>
      <Track percent={total > 0 ? (100 * (total - free)) / total : 0} />
      <span class="sgpu-user">{words}</span>
    </li>
  );
}

function Track({ percent }: { percent: number }) {
  return (
    <span class="sgpu-track" aria-hidden="true">
      <i style={{ width: `${Math.min(100, Math.max(0, percent))}%` }} />
    </span>
  );
}
