import { Notification } from "@jupyterlab/apputils";

import { formatSpan, runNames } from "../panel/format";
import type { Translate } from "../panel/host";
import type { RunRow } from "../panel/messages";
import { desktopPermission, requestDesktopPermission, showDesktopNotification } from "./desktop_notifications";
import type { DesktopPermission } from "./desktop_notifications";
import type { PanelSettings } from "./panel_settings";
import type { PanelServer } from "./pool_connection";
import { RunEndMonitor } from "./run_end_monitor";
import { TitleMark } from "./title_mark";

/** Minimum time from a run's submission to its end for a notification. */
const MIN_REPORTED_S = 60;

const REPORTED_KINDS = new Set(["cell", "call"]);

/** The parts of the page that notifications use. */
export interface EndNotificationOptions {
  readonly server: PanelServer;
  readonly settings: PanelSettings;
  readonly translate: Translate;
  /** Returns the kernels of the open notebooks. */
  kernelIds(): readonly string[];
  openRun(run: RunRow): void;
}

/**
 * Notifies the user when a long run of an open notebook ends while the page is not focused, if the setting is on: in
 * JupyterLab, on the desktop if the browser permits it, and with a mark in the tab's title until the page is focused.
 */
export class EndNotifications {
  private readonly mark = new TitleMark();
  /** The kernels of notebooks that are or were open. */
  private readonly kernels = new Set<string>();
  /** Stops the monitoring of runs; null while the setting is off. */
  private monitoring: AbortController | null = null;

  /** Must be created after the settings were loaded, so that a stored setting does not count as switched on. */
  constructor(
    private readonly options: EndNotificationOptions,
    signal: AbortSignal,
  ) {
    const update = (): void => {
      const wasOn = this.monitoring !== null;
      this.applySetting();
      if (!wasOn && this.monitoring) this.offerPermission();
    };
    const clearMark = (): void => {
      if (isPageFocused()) this.mark.clear();
    };
    const removeListener = options.settings.onChange(update);
    window.addEventListener("focus", clearMark, { signal });
    document.addEventListener("visibilitychange", clearMark, { signal });
    signal.addEventListener("abort", () => {
      removeListener();
      this.monitoring?.abort();
      this.mark.clear();
    });
    this.applySetting();
  }

  private applySetting(): void {
    const { settings, server } = this.options;
    const { notifyRunEnd } = settings.current;
    if (notifyRunEnd === (this.monitoring !== null)) return;
    this.monitoring?.abort();
    this.monitoring = null;
    if (!notifyRunEnd) {
      this.mark.clear();
      return;
    }
    this.monitoring = new AbortController();
    const onEnd = (run: RunRow, ended_s: number): void => this.onRunEnd(run, ended_s);
    new RunEndMonitor(server, onEnd, () => this.recordKernels(), this.monitoring.signal);
  }

  private recordKernels(): void {
    for (const kernel of this.options.kernelIds()) this.kernels.add(kernel);
  }

  private onRunEnd(run: RunRow, ended_s: number): void {
    const isLong = ended_s - run.submitted_at >= MIN_REPORTED_S;
    if (!isLong || !REPORTED_KINDS.has(run.kind) || !this.kernels.has(run.kernel) || isPageFocused()) return;
    const { translate: t } = this.options;
    const text = endText(run, ended_s, t);
    const open = (): void => this.options.openRun(run);
    Notification.emit(text, notificationType(run), {
      autoClose: false,
      actions: [{ label: t("Open the run"), callback: open }],
    });
    showDesktopNotification(text, run.notebook, `sgpu-run-${run.run_id}`, open);
    this.mark.show();
  }

  // ---------------------------------------------------------------- the permission for desktop notifications

  /** Offers a button that asks for the permission: browsers ask only on a click, and that in the settings is over. */
  private offerPermission(): void {
    const { translate: t } = this.options;
    if (desktopPermission() !== "default") {
      this.explainRefusal(desktopPermission());
      return;
    }
    Notification.info(t("Ends of runs can also be shown on the desktop."), {
      autoClose: false,
      actions: [
        {
          label: t("Allow"),
          caption: t("Ask the browser for the permission"),
          callback: () => void requestDesktopPermission().then((permission) => this.explainRefusal(permission)),
        },
      ],
    });
  }

  private explainRefusal(permission: DesktopPermission): void {
    const { translate: t } = this.options;
    if (permission === "denied") {
      Notification.warning(
        t("The browser blocks desktop notifications of this page, so ends of runs are shown in the page only. Allow them in the browser's settings of this site."),
      );
    } else if (permission === "unavailable") {
      Notification.warning(
        t("The browser shows desktop notifications only of pages with HTTPS, so ends of runs are shown in the page only."),
      );
    }
  }
}

/** Returns `train_digits succeeded after 12 min`, or `train_digits failed: rank 3: ValueError: bad batch`. */
export function endText(run: RunRow, ended_s: number, t: Translate): string {
  const [, name] = runNames(run);
  if (run.state === "failed" && run.reason !== "") return t("%1 failed: %2", name, run.reason);
  return t("%1 %2 after %3", name, t(run.state), formatSpan(ended_s - (run.started_at ?? run.submitted_at)));
}

function notificationType(run: RunRow): "success" | "error" | "info" {
  if (run.state === "succeeded") return "success";
  return run.tone === "bad" ? "error" : "info";
}

/** Returns whether the page is visible and has the focus. */
function isPageFocused(): boolean {
  return !document.hidden && document.hasFocus();
}
