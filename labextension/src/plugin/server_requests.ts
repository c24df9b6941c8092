import { URLExt } from "@jupyterlab/coreutils";
import { ServerConnection } from "@jupyterlab/services";

import type { Request } from "./run_server";

/** Returns a function that sends requests to the Jupyter server with JupyterLab's authentication. */
export function createRequest(settings: ServerConnection.ISettings): Request {
  return (path, init) => ServerConnection.makeRequest(URLExt.join(settings.baseUrl, path), init, settings);
}

/** Returns a function that makes the URL of a path of the Jupyter server, for links: the browser sends its cookie. */
export function createLocate(settings: ServerConnection.ISettings): (path: string) => string {
  return (path) => URLExt.join(settings.baseUrl, path);
}

/** Opens a websocket to the Jupyter server, authenticated like JupyterLab's kernel websockets. */
export function openSocket(settings: ServerConnection.ISettings, path: string): WebSocket {
  const url = URLExt.join(settings.wsUrl, path);
  const token = settings.appendToken && settings.token !== "" ? `?token=${encodeURIComponent(settings.token)}` : "";
  return new settings.WebSocket(url + token);
}
