"""The callbacks of the agent in which faults are planted, by what triggers them."""

FRESH = (
    "launch:Launches.launch",
    "launch:Launches._start",
    "launch:StandbyGroups.take",
    "ranks.group:Group.forked",
    "ranks.group:Group._said",
    "ranks.group:Group._wrote",
    "runs.execution_kinds:FreshRun.start",
    "runs.execution_kinds:FreshRun.rank_said",
    "runs.execution:Execution._all_there",
    "runs.execution:Execution._take_result",
    "runs.execution:Execution._end",
    "ranks.rank_output:RankOutput.flush",
    "ranks.rank_output:RankOutput.drain",
    "failures:MemoryWatch.begin",
    "failures:RankOutcomes.last_word",
    "runs.run_files:RunFiles.describe",
    "runs.run_files:RunFiles.take_result",
    "reports:Reports.happened",
)
# of these, the one that may be called after a short run has ended
WHILE_IT_GOES_ON = ("failures:MemoryWatch.begin",)
# called after the run's end is reported
AFTER = (
    "ranks.group:Group.exited",
    "runs.execution_kinds:FreshRun.rank_exited",
    "runs.execution_kinds:FreshRun._release_ranks",
    "runs.execution_kinds:FreshRun._finish_if_gone",
    "runs.run_files:RunFiles.ended",
    "reports:Reports.gone",
    "run_registry:RunRegistry.run_gone",
    "run_registry:RunRegistry.ranks_gone",
)
# called while the run goes on; a fault in these does not end the run
WATCHING = (
    "watch.sampling:RunSampler.begin",
    "watch.sampling:RunSampler.sample",
    "watch.sampling:Sampling._tick",
    "launch:StandbyGroups.tend",
)
# the same, called after the run
SPARED = (
    "run_registry:RunRegistry._replenish",
    "run_registry:RunRegistry._keep",
    "runs.run_memory:RunMemory.keep",
)
FAILING = (
    "runs.execution:Execution._take_failure",
    "runs.execution:Execution._decide",
    "ranks.stop:Terminator.begin",
    "ranks.stop:Terminator.end",
)
CELLS = (
    "runs.execution_kinds:SessionCell.start",
    "runs.execution_kinds:SessionCell.rank_said",
    "runs.execution_kinds:SessionCell._settle",
    "runs.execution_kinds:SessionCell._write_down",
    "runs.session:Session.execute",
    "runs.session:Session.cell_over",
    "runs.session_repair:SessionLogs.lend",
    "runs.session_repair:SessionLogs.take_back",
    "ranks.orders:send_cells",
)
SESSIONS = (
    "runs.session:Session.start",
    "runs.session:Session._connected",
    "runs.session:Session._say_end",
    "runs.session:Session._finish_if_gone",
    "runs.session_repair:SessionRepair.fail",
)
ASKED = ("runs.session:Session.ask", "runs.session_repair:Questions.answered", "runs.session:Session.restart")
STACKS = (
    "watch.stack_taking:StackTaker._ask",
    "watch.stack_taking:StackTaker._look",
    "watch.stack_taking:StackTaker._finish",
)
CALLBACKS = (*FRESH, *AFTER, *WATCHING, *SPARED, *FAILING, *CELLS, *SESSIONS, *ASKED, *STACKS)
# only these report to the pool
TOLD = ("reports:Reports.happened", "reports:Reports.gone", "run_registry:RunRegistry.ranks_gone")
OF_SESSION = tuple(name for name in CELLS if name.startswith("session"))
AT_ITS_END = (
    "runs.session:Session._say_end",
    "runs.session:Session._finish_if_gone",
    "runs.session_repair:SessionRepair.fail",
)
# these do not know their run
UNNAMED = (
    "failures:MemoryWatch.begin",
    "failures:RankOutcomes.last_word",
    "watch.sampling:Sampling._tick",
    "launch:StandbyGroups.tend",
)
