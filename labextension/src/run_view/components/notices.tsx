import { copyText } from "../clipboard";
import type { RunModel } from "../run_model";

function CloseButton({ onClick }: { onClick: () => void }) {
  return (
    <button type="button" class="sgpu-close" aria-label="close" onClick={onClick}>
      ×
    </button>
  );
}

/** Why the link has ended, and the command that shows the run again. */
function EndedLink({ model }: { model: RunModel }) {
  const run = model.snapshot;
  const reason = model.link.ended;
  if (!run) return <div class="sgpu-banner">{reason}</div>;
  const command = run.attach;
  return (
    <div class="sgpu-banner" role="alert">
      <span>
        {reason.replace(/[.;:]$/, "")}; this was run {run.short_id}
        {command && !reason.includes(command) && (
          <>
            : <code>{command}</code> shows it
          </>
        )}
      </span>
      {command && (
        <button type="button" onClick={() => void copyText(command).then((isCopied) => isCopied || model.showNotice(`can't copy here: type ${command}`))}>
          Copy command
        </button>
      )}
    </div>
  );
}

/** Messages about the link, the kernel and the buttons' actions. */
export function Notices({ model }: { model: RunModel }) {
  const { link, notice, snapshot } = model;
  const isFinal = snapshot?.final === true;
  return (
    <>
      {link.ended && !isFinal && <EndedLink model={model} />}
      {!link.ended && link.away && !isFinal && (
        <div class="sgpu-banner" role="status">
          the link to the kernel is down; the run continues, and its updates arrive when the link is back
        </div>
      )}
      {!link.ended && !link.away && link.busy && !isFinal && (
        <div class="sgpu-banner" role="status">
          the kernel is busy with a cell and answers this view when the cell has ended
          {model.interrupts && model.transport.interrupt && "; Cancel interrupts it"}
        </div>
      )}
      {notice && (
        <section class={notice.isStacks ? "sgpu-stacks" : "sgpu-notice"} role="status" aria-label={notice.isStacks ? "stacks" : "notice"}>
          <div class={notice.isStacks ? "sgpu-code" : ""} tabIndex={notice.isStacks ? 0 : -1}>
            {notice.lines.map((text, index) => (
              <div key={index}>{text || "\u200b"}</div>
            ))}
          </div>
          <CloseButton onClick={() => model.dismissNotice()} />
        </section>
      )}
    </>
  );
}
