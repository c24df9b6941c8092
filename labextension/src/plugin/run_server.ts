import { readAnswer, readSnapshot, readUpdate } from "../run_view/messages";
import type { Answer, Question, Snapshot, FeedUpdate } from "../run_view/messages";
import type { PageServer } from "../run_page/page_model";
import { mlflowAddress, pageFiles, runPage } from "../run_page/records";
import type { MlflowAddress, PageFiles, RunPage } from "../run_page/records";
import { NoAnswer } from "../shared/widget_requests";

/** Sends an authenticated request to the Jupyter server; the path is relative to the server's base URL. */
export type Request = (path: string, init: RequestInit) => Promise<Response>;

/** A run that was submitted from a notebook's kernel. */
export interface SubmittedRun {
  readonly run_id: string;
  /** The cell's id, "" when it is not known. */
  readonly cell: string;
  readonly final: boolean;
  /** Seconds since the epoch; null while the run is active, or if its end was not recorded. */
  readonly ended: number | null;
  readonly execution_count: number | null;
  /** Whether its cell is executing until the run ends. */
  readonly blocks: boolean;
}

/** A run's changes since the last request. */
export interface RunChanges {
  readonly snapshot: Snapshot | null;
  readonly updates: readonly FeedUpdate[];
  /** Number of the last `NewLines`. */
  readonly seq: number;
  /** Number of lines of all ranks so far. */
  readonly lines: number;
  /** Incremented when a rank displays something or clears its output. */
  readonly displays: number;
  readonly final: boolean;
}

/** The outputs of a run's cell. */
export interface CellOutputs {
  readonly outputs: readonly CellOutput[];
  readonly execution_count: number | null;
}

/** An output in the notebook format. */
export interface CellOutput {
  readonly output_type: string;
  readonly [key: string]: unknown;
}

/** The server has replied with an error; `status` is the HTTP status. */
export class ServerError extends NoAnswer {
  constructor(
    readonly status: number,
    text: string,
  ) {
    super(text);
  }
}

/** Requests to the Jupyter server about runs. Methods throw `ServerError`, or the error of a request that failed. */
export class RunServer implements PageServer {
  /** @param locate: Returns the URL of a path on the server, for links. */
  constructor(
    private readonly request: Request,
    private readonly locate: (path: string) => string = (path) => path,
  ) {}

  async runs(kernel: string, signal: AbortSignal): Promise<readonly SubmittedRun[]> {
    const query = new URLSearchParams({ kernel });
    return (await this.get(`sgpu/runs?${query.toString()}`, signal)) as readonly SubmittedRun[];
  }

  /** Returns the changes since `known`; waits for them for at most `wait_s`. */
  async changes(
    run: string,
    known: { after: number; lines: number; drawn: number; displays: number },
    wait_s: number,
    signal: AbortSignal,
  ): Promise<RunChanges> {
    const query = new URLSearchParams({ wait: String(wait_s) });
    for (const [name, value] of Object.entries(known)) query.set(name, String(value));
    const changes = (await this.get(`${path(run)}/news?${query.toString()}`, signal)) as RunChanges;
    return {
      ...changes,
      snapshot: changes.snapshot === null ? null : readSnapshot(changes.snapshot),
      updates: changes.updates.map(readUpdate),
    };
  }

  async ask(run: string, question: Question, signal: AbortSignal): Promise<Answer> {
    const body = JSON.stringify(question);
    return readAnswer(await this.requestJson(`${path(run)}/ask`, { method: "POST", body, signal }));
  }

  /** Returns the run's final outputs; throws `ServerError` with 409 while it is active. */
  async outputs(run: string, signal: AbortSignal): Promise<CellOutputs> {
    return (await this.get(`${path(run)}/outputs`, signal)) as CellOutputs;
  }

  /** Returns the outputs that the run's ranks have displayed so far. */
  async displays(run: string, signal: AbortSignal): Promise<CellOutputs> {
    return (await this.get(`${path(run)}/displays`, signal)) as CellOutputs;
  }

  /** Returns the run's page: its code, options, phases and environment. */
  async page(run: string, signal: AbortSignal): Promise<RunPage> {
    return runPage(await this.get(`${path(run)}/page`, signal), "page", false);
  }

  /** Returns the files that the run's ranks have written. */
  async files(run: string, signal: AbortSignal): Promise<PageFiles> {
    return pageFiles(await this.get(`${path(run)}/files`, signal), "files", false);
  }

  /** Starts `mlflow ui` for the run's store unless it is running; the address has no URL while it starts. */
  async mlflowAddress(run: string, signal: AbortSignal): Promise<MlflowAddress> {
    return mlflowAddress(await this.requestJson(`${path(run)}/mlflow`, { method: "POST", signal }), "address", false);
  }

  fileUrl(run: string, name: string): string {
    return this.locate(`${path(run)}/files/${name.split("/").map(encodeURIComponent).join("/")}`);
  }

  private get(path: string, signal: AbortSignal): Promise<unknown> {
    return this.requestJson(path, { method: "GET", signal });
  }

  private async requestJson(path: string, init: RequestInit): Promise<unknown> {
    const response = await this.request(path, init);
    if (response.ok) return response.json();
    throw new ServerError(response.status, await errorText(response));
  }
}

function path(run: string): string {
  return `sgpu/runs/${encodeURIComponent(run)}`;
}

/** Returns the message of an error reply, or a sentence with its status. */
export async function errorText(response: Response): Promise<string> {
  try {
    const { message } = (await response.json()) as { message?: unknown };
    if (typeof message === "string" && message) return message;
  } catch {
    // the body is not JSON, but an error page of a proxy or of the server
  }
  return `the Jupyter server answered ${response.status} ${response.statusText}`.trim();
}
