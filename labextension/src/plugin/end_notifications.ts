import { Notification } from "@jupyterlab/apputils";

import { formatSpan, runNames } from "../panel/format";
import type { Translate } from "../panel/host";
import type { RunRow } from "../panel/messages";
import { desktopPermission, requestDesktopPermission, showDesktopNotification } from "./desktop_notifications";
import type { DesktopPermission } from "./desktop_notifications";
import type { PanelSettings } from "./panel_settings";
import type { PanelServer } from "./pool_connection";
import { RunEnds } from "./run_ends";
import { TitleMark } from "./title_mark";

/** Shorter runs are not reported, counted from their submission. */
export const MIN_REPORTED_S = 60;

const REPORTED_KINDS = new Set(["cell", "call"]);

/** The page's parts that are used here. */
export interface EndNotificationOptions {
  readonly server: PanelServer;
  readonly settings: PanelSettings;
  readonly translate: Translate;
  /** Returns the kernels of the open notebooks. */
  kernelIds(): readonly string[];
  openRun(run: RunRow): void;
}

/**
 * Notifies the user of long runs of the open notebooks that end while nobody looks at the page, if the settings say so:
 * in JupyterLab, on the desktop if that is permitted, and with a mark in the tab's title until somebody looks.
 */
export class EndNotifications {
  private readonly mark = new TitleMark();
  /** The kernels of notebooks that are or were open. */
  private readonly kernels = new Set<string>();
  private following: AbortController | null = null;

  /** To be created when the settings have been loaded, so that a stored setting does not count as switched on. */
  constructor(
    private readonly options: EndNotificationOptions,
    signal: AbortSignal,
  ) {
    const update = (): void => {
      const wasOn = this.following !== null;
      this.followSetting();
      if (!wasOn && this.following) this.askPermission();
    };
    const clearMark = (): void => {
      if (isLookedAt()) this.mark.clear();
    };
    const removeListener = options.settings.onChange(update);
    window.addEventListener("focus", clearMark, { signal });
    document.addEventListener("visibilitychange", clearMark, { signal });
    signal.addEventListener("abort", () => {
      removeListener();
      this.following?.abort();
      this.mark.clear();
    });
    this.followSetting();
  }

  private followSetting(): void {
    const { settings, server } = this.options;
    const { notifyRunEnd } = settings.current;
    if (notifyRunEnd === (this.following !== null)) return;
    this.following?.abort();
    this.following = null;
    if (!notifyRunEnd) {
      this.mark.clear();
      return;
    }
    this.following = new AbortController();
    const onEnd = (run: RunRow, ended_s: number): void => this.onRunEnd(run, ended_s);
    new RunEnds(server, onEnd, () => this.noteKernels(), this.following.signal);
  }

  private noteKernels(): void {
    for (const kernel of this.options.kernelIds()) this.kernels.add(kernel);
  }

  private onRunEnd(run: RunRow, ended_s: number): void {
    const isLong = ended_s - run.submitted_at >= MIN_REPORTED_S;
    if (!isLong || !REPORTED_KINDS.has(run.kind) || !this.kernels.has(run.kernel) || isLookedAt()) return;
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

  /** Asks for the permission; the settings are saved too late for the browser to count the click that changed them. */
  private askPermission(): void {
    const { translate: t } = this.options;
    if (desktopPermission() !== "default") {
      this.explain(desktopPermission());
      return;
    }
    Notification.info(t("Ends of runs can also be shown on the desktop."), {
      autoClose: false,
      actions: [
        {
          label: t("Allow"),
          caption: t("Ask the browser for the permission"),
          callback: () => void requestDesktopPermission().then((permission) => this.explain(permission)),
        },
      ],
    });
  }

  private explain(permission: DesktopPermission): void {
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

/** Whether somebody is looking at the page. */
function isLookedAt(): boolean {
  return !document.hidden && document.hasFocus();
}
