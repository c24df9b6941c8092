import { Widget } from "@lumino/widgets";

import { mountPanel } from "../panel";
import type { PanelHost } from "../panel/host";
import { gpuIcon } from "./icon";

/** The panel in the application's left area; it is drawn when it is first shown. */
export class Sidebar extends Widget {
  private readonly end = new AbortController();
  private isDrawn = false;

  /**
   * @param makeHost: Called once, when the panel is drawn.
   * @param ready: Resolves when the settings and the panel's stored state are loaded.
   * @param looked: Called whenever the panel is shown or hidden.
   */
  constructor(
    private readonly makeHost: (signal: AbortSignal) => PanelHost,
    private readonly ready: Promise<unknown>,
    private readonly looked: (looked: boolean) => void,
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
    this.end.abort();
    super.dispose();
  }

  protected override onAfterAttach(): void {
    this.look();
  }

  protected override onAfterShow(): void {
    this.look();
  }

  protected override onAfterHide(): void {
    this.look();
  }

  protected override onActivateRequest(): void {
    this.node.focus();
  }

  private look(): void {
    this.looked(this.isVisible);
    if (!this.isVisible || this.isDrawn) return;
    this.isDrawn = true;
    void this.ready.then(() => mountPanel(this.node, this.makeHost(this.end.signal), this.end.signal));
  }
}
