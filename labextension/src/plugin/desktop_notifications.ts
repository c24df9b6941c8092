/** Whether this page may show desktop notifications; `unavailable` without HTTPS, except on localhost. */
export type DesktopPermission = NotificationPermission | "unavailable";

export function desktopPermission(): DesktopPermission {
  return "Notification" in window && window.isSecureContext ? window.Notification.permission : "unavailable";
}

/** Asks the user for the permission. Browsers ask only in response to a click or a key press. */
export async function requestDesktopPermission(): Promise<DesktopPermission> {
  return desktopPermission() === "unavailable" ? "unavailable" : window.Notification.requestPermission();
}

/**
 * Shows a desktop notification if that is permitted.
 *
 * @param tag: Replaces an earlier notification with the same tag, which another page may have shown.
 */
export function showDesktopNotification(title: string, body: string, tag: string, onClick: () => void): void {
  if (desktopPermission() !== "granted") return;
  let shown: Notification;
  try {
    shown = new window.Notification(title, { body, tag });
  } catch {
    // Chrome on Android allows notifications only in service workers
    return;
  }
  shown.onclick = () => {
    window.focus();
    shown.close();
    onClick();
  };
}
