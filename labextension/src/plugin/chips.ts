import type { NotebookPanel } from "@jupyterlab/notebook";
import { Widget } from "@lumino/widgets";

import type { Translate } from "../panel/host";
import { chipWords } from "./chip_words";
import { gpuIcon } from "./icon";
import type { PanelSettings } from "./panel_settings";
import type { PoolConnection } from "./pool_connection";

const TICK_MS = 1_000;

/** What chips have in common. */
export interface ChipPlace {
  readonly connection: PoolConnection;
  readonly settings: PanelSettings;
  readonly translate: Translate;
  /** Whether the button is shown without a session too, where the panel has no tab of its own. */
  readonly alwaysThere: boolean;
  openPanel(): void;
}

/**
 * The sessions of the page's notebooks, each in its notebook's toolbar.
 *
 * The pool is watched while one of them is visible.
 */
export class Chips {
  private readonly all = new Set<Chip>();
  private timer: ReturnType<typeof setInterval> | undefined;

  constructor(private readonly place: ChipPlace) {
    place.connection.listen({ onUpdate: (update) => update.kind !== "command-result" && this.redraw(), linked: () => this.redraw() });
    place.settings.onChange(() => this.look());
    document.addEventListener("visibilitychange", () => this.look());
  }

  /** The chip of a notebook, for its toolbar. */
  readonly make = (panel: NotebookPanel): Widget => {
    const chip = new Chip(panel, this.place, () => this.look());
    this.all.add(chip);
    chip.disposed.connect(() => {
      this.all.delete(chip);
      this.look();
    });
    return chip;
  };

  /** Watches the pool while a chip is visible. */
  private look(): void {
    const { connection, settings } = this.place;
    const isSeen = settings.current.showChip && !document.hidden && [...this.all].some((chip) => chip.panel.isVisible);
    clearInterval(this.timer);
    this.timer = undefined;
    if (isSeen) {
      connection.keep(this);
      this.timer = setInterval(() => this.redraw(), TICK_MS);
    } else {
      connection.rest(this);
    }
    this.redraw();
  }

  private redraw(): void {
    for (const chip of this.all) if (chip.panel.isVisible) chip.draw();
  }
}

class Chip extends Widget {
  private readonly button = document.createElement("button");
  private readonly label = document.createElement("span");
  private shown: string | null = null;

  constructor(
    readonly panel: NotebookPanel,
    private readonly place: ChipPlace,
    private readonly changed: () => void,
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
    button.addEventListener("click", () => place.openPanel());
    this.node.append(button);
    const kernelChanged = (): void => this.draw();
    panel.sessionContext.kernelChanged.connect(kernelChanged);
    this.disposed.connect(() => panel.sessionContext.kernelChanged.disconnect(kernelChanged));
    this.draw();
  }

  draw(): void {
    const { connection, settings, translate: t, alwaysThere } = this.place;
    const { model } = connection;
    const kernel = this.panel.sessionContext.session?.kernel?.id ?? "";
    const session = settings.current.showChip ? model.sessionOf(kernel, "") : null;
    const words = session ? chipWords(session, model.picture, model.now_s, t) : "";
    if (words === this.shown) return;
    const was = this.shown;
    this.shown = words;
    this.label.textContent = words;
    const title = words || t("GPU environment");
    this.button.title = session ? t("Open the GPU environment: %1", title) : t("Open the GPU environment");
    this.button.setAttribute("aria-label", this.button.title);
    const isThere = words !== "" || alwaysThere;
    if (was === null || isThere === this.isHidden) this.setHidden(!isThere);
  }

  protected override onAfterAttach(): void {
    this.changed();
  }

  protected override onAfterShow(): void {
    this.changed();
  }

  protected override onAfterHide(): void {
    this.changed();
  }
}
