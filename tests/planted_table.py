"""The callbacks of the agent in which faults are planted, by what strikes them."""

FRESH = (
    "service:Agent._launch",
    "launches:Launches._start",
    "groups:Groups.take",
    "group:Group.forked",
    "group:Group._said",
    "group:Group._wrote",
    "fresh_run:FreshRun.start",
    "fresh_run:FreshRun.rank_said",
    "execution:Execution._all_there",
    "execution:Execution._take_result",
    "execution:Execution._end",
    "output:RankOutput.flush",
    "output:RankOutput.drain",
    "deaths:Coroner.begin",
    "gathering:Gathering.last_word",
    "belongings:Belongings.describe",
    "belongings:Belongings.take_result",
    "reports:Reports.happened",
)
# of these, one is called when a short run may have ended
WHILE_IT_GOES_ON = ("deaths:Coroner.begin",)
# the run's last word was said by then
AFTER = (
    "group:Group.exited",
    "fresh_run:FreshRun.rank_exited",
    "fresh_run:FreshRun._let_leave",
    "fresh_run:FreshRun._finish_if_gone",
    "belongings:Belongings.ended",
    "reports:Reports.gone",
    "held_runs:HeldRuns.run_gone",
    "held_runs:HeldRuns.ranks_gone",
)
# what they cost is less than the run, while it goes on
WATCHING = (
    "run_sampler:RunSampler.begin",
    "run_sampler:RunSampler.sample",
    "sampling:Sampling._tick",
    "groups:Groups.tend",
)
# and afterwards
SPARED = (
    "held_runs:HeldRuns._replenish",
    "held_runs:HeldRuns._keep",
    "run_memory:RunMemory.keep",
)
FAILING = (
    "execution:Execution._take_failure",
    "blame:Blame._decide",
    "stop_path:StopPath.begin",
    "stop_path:StopPath.end",
)
CELLS = (
    "session_cell:SessionCell.start",
    "session_cell:SessionCell.rank_said",
    "session_cell:SessionCell._settle",
    "session_cell:SessionCell._write_down",
    "session:Session.execute",
    "session:Session.cell_over",
    "session_logs:SessionLogs.lend",
    "session_logs:SessionLogs.take_back",
    "cell_orders:send_session_cells",
)
SESSIONS = (
    "session:Session.start",
    "session:Session._take_joined",
    "session:Session._say_end",
    "session:Session._finish_if_gone",
    "group_care:GroupCare.fail",
)
ASKED = ("session:Session.ask", "questions:Questions.answered", "session:Session.restart")
STACKS = ("stack_taking:StackTaker._ask", "stack_taking:StackTaker._look", "stack_taking:StackTaker._finish")
CALLBACKS = (*FRESH, *AFTER, *WATCHING, *SPARED, *FAILING, *CELLS, *SESSIONS, *ASKED, *STACKS)
# nothing but these can tell the pool
TOLD = ("reports:Reports.happened", "reports:Reports.gone", "held_runs:HeldRuns.ranks_gone")
OF_SESSION = tuple(name for name in CELLS if name.startswith("session"))
AT_ITS_END = ("session:Session._say_end", "session:Session._finish_if_gone", "group_care:GroupCare.fail")
# they do not know their run
UNNAMED = ("gathering:Gathering.last_word", "sampling:Sampling._tick", "groups:Groups.tend")
