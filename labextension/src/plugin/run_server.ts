import { readAnswer, readSnapshot, readTold } from "../run_view/messages";
import type { Answer, Question, Snapshot, Told } from "../run_view/messages";
import { NoAnswer } from "../shared/model_questions";

/** Sends a request to the Jupyter server, with its token and its cookies; the path is below the server's base URL. */
export type Request = (path: string, init: RequestInit) => Promise<Response>;

/** A run that was submitted from a notebook's kernel. */
export interface OwnedRun {
  readonly run_id: string;
  /** The cell's id, "" when it is not known. */
  readonly cell: string;
  readonly final: boolean;
  /** Seconds since the epoch; null while it goes on, or when nobody saw its end. */
  readonly ended: number | null;
  readonly execution_count: number | null;
  /** Its cell waits for its end. */
  readonly blocks: boolean;
}

/** What is new of a run. */
export interface News {
  readonly snapshot: Snapshot | null;
  readonly told: readonly Told[];
  /** Number of the last `NewLines`. */
  readonly seq: number;
  /** Lines of all ranks so far. */
  readonly lines: number;
  /** Grows with every rich display. */
  readonly displays: number;
  readonly final: boolean;
}

/** What a run's cell shows. */
export interface CellOutputs {
  readonly outputs: readonly CellOutput[];
  readonly execution_count: number | null;
}

/** One output in the notebook's own format. */
export interface CellOutput {
  readonly output_type: string;
  readonly [key: string]: unknown;
}

/** The server has answered, but not with what was asked for; `status` is HTTP's. */
export class Refused extends NoAnswer {
  constructor(
    readonly status: number,
    text: string,
  ) {
    super(text);
  }
}

/** What can be asked of the Jupyter server about runs. Methods throw `Refused`, or what the network throws. */
export class RunServer {
  constructor(private readonly request: Request) {}

  async runs(kernel: string, signal: AbortSignal): Promise<readonly OwnedRun[]> {
    const query = new URLSearchParams({ kernel });
    return (await this.get(`sgpu/runs?${query.toString()}`, signal)) as readonly OwnedRun[];
  }

  /** Waits at most `wait_s` for something that is newer than what the numbers say. */
  async news(
    run: string,
    known: { after: number; lines: number; drawn: number; displays: number },
    wait_s: number,
    signal: AbortSignal,
  ): Promise<News> {
    const query = new URLSearchParams({ wait: String(wait_s) });
    for (const [name, value] of Object.entries(known)) query.set(name, String(value));
    const found = (await this.get(`${path(run)}/news?${query.toString()}`, signal)) as News;
    return {
      ...found,
      snapshot: found.snapshot === null ? null : readSnapshot(found.snapshot),
      told: found.told.map(readTold),
    };
  }

  async ask(run: string, question: Question, signal: AbortSignal): Promise<Answer> {
    const body = JSON.stringify(question);
    return readAnswer(await this.json(`${path(run)}/ask`, { method: "POST", body, signal }));
  }

  /** The run's last outputs; `Refused` with 409 while it goes on. */
  async outputs(run: string, signal: AbortSignal): Promise<CellOutputs> {
    return (await this.get(`${path(run)}/outputs`, signal)) as CellOutputs;
  }

  /** What its ranks have displayed so far. */
  async displays(run: string, signal: AbortSignal): Promise<CellOutputs> {
    return (await this.get(`${path(run)}/displays`, signal)) as CellOutputs;
  }

  private get(path: string, signal: AbortSignal): Promise<unknown> {
    return this.json(path, { method: "GET", signal });
  }

  private async json(path: string, init: RequestInit): Promise<unknown> {
    const response = await this.request(path, init);
    if (response.ok) return response.json();
    throw new Refused(response.status, await reason(response));
  }
}

function path(run: string): string {
  return `sgpu/runs/${encodeURIComponent(run)}`;
}

/** Returns what a refusal says, or what its status is. */
export async function reason(response: Response): Promise<string> {
  try {
    const found = (await response.json()) as { message?: unknown };
    if (typeof found.message === "string" && found.message) return found.message;
  } catch {
    // no JSON: a proxy's page, or the server's own
  }
  return `the Jupyter server answered ${response.status} ${response.statusText}`.trim();
}
