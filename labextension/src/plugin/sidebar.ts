import { Widget } from "@lumino/widgets";

import { mountPanel } from "../panel";
import type { PanelHost } from "../panel/host";
import { gpuIcon } from "./icon";

/** The panel in the application's left area, drawn when it is first shown. */
export class Sidebar extends Widget {
  private readonly controller = new AbortController();
  private isDrawn = false;

  /**
   * @param createHost: Called once, when the panel is drawn.
   * @param ready: Resolves when the settings and the panel's stored state are loaded.
   * @param onVisibilityChange: Called whenever the panel is shown or hidden.
   */
  constructor(
    private readonly createHost: (signal: AbortSignal) => PanelHost,
    private readonly ready: Promise<unknown>,
    private readonly onVisibilityChange: (isVisible: boolean) => void,
    title: string,
  ) {
    super();
    this.id = "sgpu-panel";
    this.addClass("sgpu-sidebar");
    this.title.icon = gpuIcon;
    this.title.caption = title;
    this.node.setAttribute("role", "complementary");
    this.node.setAttribute("aria-label", title);
    this.node.style.cssText = "min-width:240px;outline:none";
    this.node.tabIndex = -1;
  }

  override dispose(): void {
    this.controller.abort();
    super.dispose();
  }

  protected override onAfterAttach(): void {
    this.drawIfVisible();
  }

  protected override onAfterShow(): void {
    this.drawIfVisible();
  }

  protected override onAfterHide(): void {
    this.drawIfVisible();
  }

  protected override onActivateRequest(): void {
    this.node.focus();
  }

  private drawIfVisible(): void {
    this.onVisibilityChange(this.isVisible);
    if (!this.isVisible || this.isDrawn) return;
    this.isDrawn = true;
    void this.ready.then(() => mountPanel(this.node, this.createHost(this.controller.signal), this.controller.signal));
  }
}
