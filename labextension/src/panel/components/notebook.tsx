import { useStored, usePanel, useTranslate } from "../context";
import type { NotebookModel } from "../notebook_model";
import { Accelerators } from "./accelerators";
import { Environment } from "./environment";
import { ConfirmChoice } from "./confirm_choice";
import { Plan } from "./plan";
import { Pools } from "./pools";
import { StateCard } from "./state_card";

/** The active notebook: the form with its choice, or the state of its kernel if the kernel has not answered. */
export function Notebook() {
  const { notebook, host } = usePanel();
  const t = useTranslate();
  if (!notebook) {
    return (
      <StateCard title={t("No notebook is open.")} text={t("You can still watch the pool.")}>
        {host.newNotebook && (
          <button type="button" onClick={() => host.newNotebook?.()}>
            {t("New notebook")}
          </button>
        )}
      </StateCard>
    );
  }
  if (notebook.link.kernelState === "disconnected" || (!notebook.kernel && notebook.isKernelUnavailable)) {
    return <KernelUnavailable notebook={notebook} />;
  }
  if (notebook.kernel) return <ChoiceForm notebook={notebook} />;
  return notebook.kernelProblem ? <KernelProblem notebook={notebook} /> : <KernelPending notebook={notebook} />;
}

function KernelUnavailable({ notebook }: { notebook: NotebookModel }) {
  const t = useTranslate();
  const { kernelState, startKernel } = notebook.link;
  const startButton = startKernel && (
    <button type="button" onClick={() => void startKernel.call(notebook.link).catch((error: unknown) => notebook.showError(error))}>
      {t("Start a kernel")}
    </button>
  );
  const retryButton = (
    <button type="button" onClick={() => notebook.retry()}>
      {t("Check again")}
    </button>
  );
  const startError = notebook.refusal && (
    <p class="sgpu-refusal" role="alert">
      {notebook.refusal}
    </p>
  );
  switch (kernelState) {
    case "dead":
      return (
        <StateCard title={t("The kernel has died.")} text={t("Its session ends with it; other runs continue.")} isBad>
          {startButton ?? retryButton}
          {startError}
        </StateCard>
      );
    case "restarting":
      return <StateCard title={t("The kernel is restarting.")} text={t("Its session ends with the old kernel.")} />;
    case "starting":
      return <StateCard title={t("The kernel is starting.")} />;
    case "disconnected":
      return (
        <StateCard title={t("The link to the kernel is down.")} text={t("Runs in the pool continue.")}>
          {retryButton}
        </StateCard>
      );
    default:
      return (
        <StateCard title={t("This notebook has no kernel.")} text={t("You can still watch the pool.")}>
          {startButton}
          {startError}
        </StateCard>
      );
  }
}

function KernelProblem({ notebook }: { notebook: NotebookModel }) {
  const t = useTranslate();
  const { kernelProblem, link } = notebook;
  const retryButton = (
    <button type="button" onClick={() => notebook.retry()}>
      {t("Ask again")}
    </button>
  );
  if (kernelProblem?.kind === "no-extension") {
    return (
      <StateCard
        title={kernelProblem.text || t("This kernel has not loaded sgpu-magic.")}
        text={link.loadExtension ? t("You can still watch the pool.") : t("Run %load_ext sgpu_magic in a cell.")}
      >
        {link.loadExtension ? (
          <button type="button" onClick={() => link.loadExtension?.()}>
            {t("Run %load_ext sgpu_magic")}
          </button>
        ) : (
          retryButton
        )}
      </StateCard>
    );
  }
  return (
    <StateCard title={kernelProblem?.text ?? ""} isBad={kernelProblem?.kind === "other-version"}>
      {retryButton}
    </StateCard>
  );
}

function KernelPending({ notebook }: { notebook: NotebookModel }) {
  const t = useTranslate();
  const isBusy = notebook.link.kernelState === "busy";
  return (
    <StateCard
      title={isBusy ? t("The kernel is busy and has not answered yet.") : t("Asking the kernel…")}
      text={t("You can still watch the pool.")}
    />
  );
}

/** The form, collapsed by default while there is a session. */
function ChoiceForm({ notebook }: { notebook: NotebookModel }) {
  const { session } = usePanel();
  const t = useTranslate();
  const [unfolded, setUnfolded] = useStored("choosing", "false");
  const { kernelProblem, isChanged } = notebook;
  const chosen = notebook.kernel?.choice_words ?? "";
  const words = chosen === "" ? t("nothing saved in the notebook") : chosen;
  if (notebook.needsConfirmation) return <ConfirmChoice notebook={notebook} />;
  const isFolded = session !== null && unfolded !== "true" && !isChanged;
  return (
    <>
      {session !== null && (
        <section class="sgpu-part sgpu-pair" aria-label={t("Choice")}>
          <span class="sgpu-soft sgpu-clip" title={words}>
            {words}
          </span>
          {!isChanged && (
            <button type="button" class="sgpu-text" aria-expanded={!isFolded} onClick={() => setUnfolded(String(isFolded))}>
              {isFolded ? t("change") : t("close")}
            </button>
          )}
        </section>
      )}
      {!isFolded && (
        <>
          <Accelerators notebook={notebook} />
          <Pools />
          <Environment notebook={notebook} />
        </>
      )}
      <Plan notebook={notebook} />
      {kernelProblem && (
        <section class="sgpu-part sgpu-pair" aria-label={t("Kernel")}>
          <span class="sgpu-soft">{kernelProblem.text}</span>
          <button type="button" class="sgpu-text" onClick={() => notebook.retry()}>
            {t("Ask again")}
          </button>
        </section>
      )}
    </>
  );
}
