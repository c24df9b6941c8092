import { useLayoutEffect, useState } from "preact/hooks";

import type { Activity } from "../../shared/activity";
import { formatDuration } from "../../shared/units";
import type { RunModel } from "../run_model";
import { ProgressBar } from "./bar";
import { Icon } from "./icon";

/** Maximum number of sessions with a button that ends them. */
const MAX_SESSIONS = 2;

/** The duration of the run and of its start, and its cost; updated every second while the view is visible. */
function Clock({ model, activity, signal }: { model: RunModel; activity: Activity; signal: AbortSignal }) {
  const [, redraw] = useState(0);
  const ticking = model.isTicking;
  useLayoutEffect(() => {
    let timer: ReturnType<typeof setTimeout> | undefined;
    const tick = () => {
      clearTimeout(timer);
      timer = undefined;
      if (!model.isTicking || !activity.active || signal.aborted) return;
      redraw((count) => count + 1);
      // shortly after the next full second, so that each second is shown exactly once
      timer = setTimeout(tick, 1000 - ((model.clock_s * 1000) % 1000) + 5);
    };
    const unsubscribe = activity.onChange(tick);
    const stop = () => clearTimeout(timer);
    signal.addEventListener("abort", stop, { once: true });
    tick();
    return () => {
      unsubscribe();
      stop();
      signal.removeEventListener("abort", stop);
    };
  }, [ticking, model, activity, signal]);
  return (
    <>
      <span class="sgpu-clock">{formatDuration(model.elapsed_s, model.starting_s, ticking)}</span>
      <Cost model={model} />
    </>
  );
}

function Cost({ model }: { model: RunModel }) {
  const cost = model.cost;
  return cost === "" ? null : (
    <>
      {" · "}
      <span class="sgpu-clock sgpu-cost">{cost}</span>
    </>
  );
}

interface Props {
  readonly model: RunModel;
  readonly activity: Activity;
  readonly signal: AbortSignal;
}

/** The run's state, name, devices, duration and buttons. */
export function Header({ model, activity, signal }: Props) {
  const run = model.snapshot;
  if (!run) {
    return (
      <header class="sgpu-head">
        <span class="sgpu-meta">{model.link.ended || "waiting for the run's first update"}</span>
      </header>
    );
  }
  const facts = [run.devices, run.pool, run.host, run.attempt].filter(Boolean);
  const hasClock = run.ticking || run.elapsed_s > 0 || run.starting_s > 0;
  const isLost = model.link.ended !== "" && !run.final;
  const isBlocked = model.isKernelBlocked && !model.transport.interrupt;
  return (
    <>
      <header class="sgpu-head">
        <div class="sgpu-title">
          {run.mark && <span class="sgpu-mark">{run.mark}</span>}
          <span class={`sgpu-state sgpu-${isLost ? "plain" : run.tone}`} role="status" aria-live="polite">
            <Icon state={isLost ? "lost" : run.state} tone={isLost ? "plain" : run.tone} />
            {isLost ? `was ${run.state}` : run.state}
          </span>
          <span class="sgpu-name">{run.name}</span>
          <span class="sgpu-meta">
            {facts.join(" · ")}
            {hasClock && (
              <>
                {facts.length > 0 && " · "}
                <Clock model={model} activity={activity} signal={signal} />
              </>
            )}
            {!hasClock && <Cost model={model} />}
            {run.meta.map((text) => ` · ${text}`)}
            {run.bar && !run.final && ` · ${run.bar.text}`}
          </span>
        </div>
        {!run.final && !isLost && (
          <span class="sgpu-buttons">
            {isBlocked && run.can_cancel && (
              <span class="sgpu-hint">{model.interrupts ? "to cancel, use the notebook's Interrupt button" : "%sgpu_disconnect ends it"}</span>
            )}
            {!isBlocked && (
              <>
                {run.ranks.length > 0 && (
                  <button
                    type="button"
                    title={model.isKernelBlocked ? "Where every rank is now (answered when the cell has ended)" : "Where every rank is now"}
                    disabled={model.pendingActions.has("stacks")}
                    onClick={() => void model.stacks()}
                  >
                    Stacks
                  </button>
                )}
                {run.own_sessions.slice(0, MAX_SESSIONS).map((session) => (
                  <button
                    key={session.run_id}
                    type="button"
                    title="End it and free its devices, for which this run waits"
                    disabled={model.pendingActions.has("end session")}
                    onClick={() => void model.endSession(session.run_id)}
                  >
                    End {session.name}
                  </button>
                ))}
                <button
                  type="button"
                  title={model.interrupts ? `Stop this run${model.isKernelBlocked ? " (interrupts the kernel)" : ""}` : "End this session and free its devices"}
                  disabled={!model.canCancel || model.pendingActions.has("cancel")}
                  onClick={() => void model.cancel()}
                >
                  {run.stop}
                </button>
              </>
            )}
          </span>
        )}
      </header>
      <ProgressBar bar={run.bar} label="progress of the run" />
    </>
  );
}
