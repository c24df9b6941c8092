import type { NotebookPanel } from "@jupyterlab/notebook";
import { Widget } from "@lumino/widgets";

import type { Translate } from "../panel/host";
import { chipLabel } from "./chip_label";
import { gpuIcon } from "./icon";
import type { PanelSettings } from "./panel_settings";
import type { PoolConnection } from "./pool_connection";

const TICK_MS = 1_000;

/** What all chips share. */
export interface ChipOptions {
  readonly connection: PoolConnection;
  readonly settings: PanelSettings;
  readonly translate: Translate;
  /** Whether chips are shown even without a session, because the panel has no tab of its own. */
  readonly alwaysVisible: boolean;
  openPanel(): void;
}

/**
 * The buttons in notebooks' toolbars that show each notebook's session.
 *
 * The pool is watched while at least one of them is visible.
 */
export class Chips {
  private readonly chips = new Set<Chip>();
  private timer: ReturnType<typeof setInterval> | undefined;

  constructor(private readonly options: ChipOptions) {
    options.connection.addListener({ onUpdate: (update) => update.kind !== "command-result" && this.redraw(), onLinkChange: () => this.redraw() });
    options.settings.onChange(() => this.updateSubscription());
    document.addEventListener("visibilitychange", () => this.updateSubscription());
  }

  /** Creates the chip of a notebook, for its toolbar. */
  readonly create = (panel: NotebookPanel): Widget => {
    const chip = new Chip(panel, this.options, () => this.updateSubscription());
    this.chips.add(chip);
    chip.disposed.connect(() => {
      this.chips.delete(chip);
      this.updateSubscription();
    });
    return chip;
  };

  /** Subscribes to the pool while a chip is visible. */
  private updateSubscription(): void {
    const { connection, settings } = this.options;
    const hasVisibleChip = settings.current.showChip && !document.hidden && [...this.chips].some((chip) => chip.panel.isVisible);
    clearInterval(this.timer);
    this.timer = undefined;
    if (hasVisibleChip) {
      connection.subscribe(this);
      this.timer = setInterval(() => this.redraw(), TICK_MS);
    } else {
      connection.unsubscribe(this);
    }
    this.redraw();
  }

  private redraw(): void {
    for (const chip of this.chips) if (chip.panel.isVisible) chip.draw();
  }
}

class Chip extends Widget {
  private readonly button = document.createElement("button");
  private readonly label = document.createElement("span");
  private drawnText: string | null = null;

  constructor(
    readonly panel: NotebookPanel,
    private readonly options: ChipOptions,
    private readonly onVisibilityChange: () => void,
  ) {
    super();
    this.addClass("sgpu-chip");
    this.addClass("jp-ToolbarButton");
    const { button, label } = this;
    button.type = "button";
    button.className = "jp-ToolbarButtonComponent";
    button.style.cssText = "display:flex;align-items:center;gap:4px;font:inherit;color:var(--jp-ui-font-color1)";
    label.style.whiteSpace = "nowrap";
    gpuIcon.element({ container: button, elementPosition: "center", height: "16px", width: "16px" });
    button.append(label);
    button.addEventListener("click", () => options.openPanel());
    this.node.append(button);
    const onKernelChange = (): void => this.draw();
    panel.sessionContext.kernelChanged.connect(onKernelChange);
    this.disposed.connect(() => panel.sessionContext.kernelChanged.disconnect(onKernelChange));
    this.draw();
  }

  draw(): void {
    const { connection, settings, translate: t, alwaysVisible } = this.options;
    const { model } = connection;
    const kernel = this.panel.sessionContext.session?.kernel?.id ?? "";
    const session = settings.current.showChip ? model.sessionOf(kernel, "") : null;
    const text = session ? chipLabel(session, model.snapshot, model.now_s, t) : "";
    if (text === this.drawnText) return;
    const previousText = this.drawnText;
    this.drawnText = text;
    this.label.textContent = text;
    const title = text || t("GPU environment");
    this.button.title = session ? t("Open the GPU environment: %1", title) : t("Open the GPU environment");
    this.button.setAttribute("aria-label", this.button.title);
    const isShown = text !== "" || alwaysVisible;
    if (previousText === null || isShown === this.isHidden) this.setHidden(!isShown);
  }

  protected override onAfterAttach(): void {
    this.onVisibilityChange();
  }

  protected override onAfterShow(): void {
    this.onVisibilityChange();
  }

  protected override onAfterHide(): void {
    this.onVisibilityChange();
  }
}
