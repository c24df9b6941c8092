import { useStored, usePanelId, usePanel, useTranslate } from "../context";
import { CPU } from "../form";
import type { PanelDevice, PanelType } from "../messages";
import { formatUsed } from "../format";
import { DeviceCurve } from "./device_curve";
import { Section } from "./section";

/** Types with more devices than this have a bar instead of squares. */
const MAX_SQUARES = 64;
/** Types with at most this many devices are expanded by default if this notebook holds some. */
const EXPANDED_UP_TO = 8;

/** The device types with their numbers of free, own and others' devices; an expanded type lists its devices. */
export function Devices() {
  const { pool, notebook } = usePanel();
  const t = useTranslate();
  const { snapshot } = pool;
  if (!snapshot || (snapshot.devices.length === 0 && snapshot.cpu_slots === 0 && snapshot.notes.length === 0)) return null;
  const kernel = notebook?.link.kernel ?? "";
  const types = snapshot.types.filter(({ type }) => type !== CPU);
  // as wide as the longest label, so that the columns beside the labels align
  const widest = Math.max(...types.map(({ label }) => label.length), 0);
  return (
    <Section title={t("Devices")} name="devices">
      <ul class="sgpu-device-types" style={{ "--type": `max(40px, ${widest}ch)` }}>
        {types.map((type) => (
          <DevicesOfType
            key={type.type}
            type={type}
            devices={snapshot.devices.filter((device) => device.type === type.type)}
            kernel={kernel}
          />
        ))}
        {snapshot.cpu_slots > 0 && <Slots total={snapshot.cpu_slots} free={snapshot.cpu_slots_free} />}
      </ul>
      {snapshot.devices.some(({ simulated }) => simulated) && (
        <p class="sgpu-soft sgpu-under">{t("Simulated devices show the CPU and memory of their ranks.")}</p>
      )}
      {snapshot.notes.map((note) => (
        <p key={note} class="sgpu-soft sgpu-under">
          {note}
        </p>
      ))}
    </Section>
  );
}

interface DevicesOfTypeProps {
  readonly type: PanelType;
  /** All devices of the type or, if there are many, this notebook's devices and a row for each node. */
  readonly devices: readonly PanelDevice[];
  readonly kernel: string;
}

function DevicesOfType({ type, devices, kernel }: DevicesOfTypeProps) {
  const t = useTranslate();
  const id = usePanelId();
  const isOwn = (device: PanelDevice): boolean => kernel !== "" && device.kernel === kernel;
  const own = devices.filter(isOwn).length;
  const free = Math.min(type.free, type.total - own);
  const others = type.total - free - own;
  // by default expanded if the list is short and this notebook holds some of the devices
  const [stored, setStored] = useStored(`devices ${type.type}`, "");
  const isOpen = stored === "" ? own > 0 && type.total <= EXPANDED_UP_TO : stored === "true";
  const words = t("%1 of %2 free", type.free, type.total);
  const more = [
    own > 0 ? t("%1 this notebook's", own) : "",
    others > 0 ? t("%1 others'", others) : "",
    type.simulated ? t("simulated") : "",
  ].filter(Boolean);
  const label = Math.max(...devices.map((device) => device.label.length), 0);
  return (
    <li>
      <button
        type="button"
        class="sgpu-device-type"
        aria-expanded={isOpen}
        aria-controls={isOpen ? id : undefined}
        title={[words, ...more].join(", ")}
        onClick={() => setStored(String(!isOpen))}
      >
        <b>{type.label}</b>
        <span class="sgpu-hidden">: </span>
        <Strip own={own} others={others} free={free} />
        <span class="sgpu-user">{words}</span>
        <span class="sgpu-hidden">{["", ...more].join(", ")}</span>
      </button>
      {isOpen && (
        <ul id={id} class="sgpu-devices" style={{ "--label": `max(52px, ${label}ch)` }}>
          {type.history !== null && (
            <li class="sgpu-device sgpu-mean">
              <b>{t("mean")}</b>
              <DeviceCurve history={type.history} memory={null} />
            </li>
          )}
          {devices.map((device) => (
            <Device key={device.uuid} device={device} isOwn={isOwn(device)} />
          ))}
        </ul>
      )}
    </li>
  );
}

/** A square for each device, with this notebook's first and the free ones last; a bar if there are many. */
function Strip({ own, others, free }: { own: number; others: number; free: number }) {
  const parts = [
    ["own", own],
    ["others", others],
    ["free", free],
  ] as const;
  if (own + others + free > MAX_SQUARES) {
    return (
      <span class="sgpu-strip sgpu-strip-bar" aria-hidden="true">
        {parts.map(([kind, count]) => (
          <i key={kind} class={`sgpu-square-${kind}`} style={{ flexGrow: count }} />
        ))}
      </span>
    );
  }
  return (
    <span class="sgpu-strip" aria-hidden="true">
      {parts.flatMap(([kind, count]) =>
        Array.from({ length: count }, (_, index) => <i key={`${kind} ${index}`} class={`sgpu-square sgpu-square-${kind}`} />),
      )}
    </span>
  );
}

function Device({ device, isOwn }: { device: PanelDevice; isOwn: boolean }) {
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
      {device.history !== null && <DeviceCurve history={device.history} memory={device} />}
    </li>
  );
}

function Slots({ total, free }: { total: number; free: number }) {
  const t = useTranslate();
  const words = t("%1 of %2 ranks free", free, total);
  return (
    <li class="sgpu-device-type sgpu-slots" title={words}>
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
