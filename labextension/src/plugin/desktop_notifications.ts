/** Whether this page may show desktop notifications; `unavailable` in pages without HTTPS, except those of localhost. */
export type DesktopPermission = NotificationPermission | "unavailable";

export function desktopPermission(): DesktopPermission {
  return "Notification" in window && window.isSecureContext ? window.Notification.permission : "unavailable";
}

/** Asks the user for the permission. Browsers ask only in reply to a click or a key. */
export async function requestDesktopPermission(): Promise<DesktopPermission> {
  return desktopPermission() === "unavailable" ? "unavailable" : window.Notification.requestPermission();
}

/**
 * Shows a desktop notification if that is permitted.
 *
 * @param tag: Pages that show a notification with the same tag share one.
 */
export function showDesktopNotification(title: string, body: string, tag: string, onClick: () => void): void {
  if (desktopPermission() !== "granted") return;
  let shown: Notification;
  try {
    shown = new window.Notification(title, { body, tag });
  } catch {
    // Chrome on Android has notifications of service workers only
    return;
  }
  shown.onclick = () => {
    window.focus();
    shown.close();
    onClick();
  };
}
