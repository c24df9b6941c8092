import type { ComponentChildren } from "preact";
import { useState } from "preact/hooks";

import type { RunPageModel } from "../page_model";
import type { MlflowAddress, PageMlflow } from "../records";

interface Props {
  readonly model: RunPageModel;
  readonly mlflow: PageMlflow;
}

/** The run's MLflow run: a link to its page on a tracking server, or what shows it in a store of files. */
export function Mlflow({ model, mlflow }: Props) {
  return (
    <section class="sgpu-page-mlflow" aria-label="mlflow">
      <h3>
        MLflow <small>{mlflow.experiment}</small>
      </h3>
      {mlflow.run_id === "" && <p>The MLflow run does not exist yet.</p>}
      {mlflow.run_id !== "" && (
        <p>
          MLflow run <code>{mlflow.run_id}</code>
        </p>
      )}
      {mlflow.url !== "" && (
        <p>
          <PageLink url={mlflow.url} />
        </p>
      )}
      {mlflow.can_start && <StartMlflow model={model} />}
      {!mlflow.can_start && mlflow.command !== "" && <Commands mlflow={mlflow} />}
    </section>
  );
}

function PageLink({ url }: { url: string }) {
  return (
    <a href={url} target="_blank" rel="noopener noreferrer">
      Open in MLflow
    </a>
  );
}

/** What to run in a terminal: where the server can't start `mlflow ui`. */
function Commands({ mlflow }: { mlflow: PageMlflow }) {
  if (mlflow.pool !== "") {
    return <Command text={mlflow.command}>Its store is on the machine of the pool {mlflow.pool}. There, this shows it:</Command>;
  }
  return (
    <>
      {mlflow.install !== "" && (
        <Command text={mlflow.install}>MLflow's pages are not installed; mlflow-skinny has none. This installs them:</Command>
      )}
      <Command text={mlflow.command}>Then refresh this page, or start them in a terminal:</Command>
    </>
  );
}

function Command({ text, children }: { text: string; children: ComponentChildren }) {
  return (
    <>
      <p>{children}</p>
      <pre tabIndex={0}>{text}</pre>
    </>
  );
}

/** Starts `mlflow ui`, opens it at the run, and says where it listens. */
function StartMlflow({ model }: { model: RunPageModel }) {
  const [isStarting, setStarting] = useState(false);
  const [address, setAddress] = useState<MlflowAddress | null>(null);
  const [error, setError] = useState("");
  const onClick = async (): Promise<void> => {
    // opened now: after an answer the browser would block it
    const opened = isLoopback(location.hostname) ? window.open("about:blank", "_blank") : null;
    setStarting(true);
    setError("");
    try {
      const found = await model.mlflowAddress();
      setAddress(found);
      if (opened) {
        opened.opener = null;
        opened.location.replace(found.url);
      }
    } catch (reason) {
      opened?.close();
      setAddress(null);
      setError(reason instanceof Error ? reason.message : String(reason));
    }
    setStarting(false);
  };
  return (
    <>
      <p>
        <button type="button" aria-disabled={isStarting} onClick={() => !isStarting && void onClick()}>
          Open in MLflow
        </button>{" "}
        <span role="status">{isStarting && "mlflow ui starts, which takes some seconds"}</span>
      </p>
      {error !== "" && (
        <p class="sgpu-bad" role="alert">
          {error}
        </p>
      )}
      {address && <Address address={address} />}
    </>
  );
}

function Address({ address }: { address: MlflowAddress }) {
  const { url, port, host } = address;
  return (
    <>
      <p>
        <code>mlflow ui</code> runs until this Jupyter server ends, and only the server's machine reaches it:{" "}
        <a href={url} target="_blank" rel="noopener noreferrer">
          {url}
        </a>
      </p>
      {!isLoopback(location.hostname) && (
        <Command text={`ssh -N -L ${port}:127.0.0.1:${port} ${host}`}>
          This page comes from another machine than yours. If you can log in there, this makes the address work on your own:
        </Command>
      )}
    </>
  );
}

function isLoopback(hostname: string): boolean {
  return hostname === "localhost" || hostname === "[::1]" || hostname.startsWith("127.");
}
