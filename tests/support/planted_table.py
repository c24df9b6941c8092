"""The callbacks of the agent in which faults are planted, by what triggers them."""

from planted_faults import at

from sgpu_magic.agent.failures import RankOutcomes
from sgpu_magic.agent.launch import RunLauncher
from sgpu_magic.agent.memory_watch import MemoryWatch
from sgpu_magic.agent.ranks.group import Group
from sgpu_magic.agent.ranks.orders import send_cells
from sgpu_magic.agent.ranks.rank_output import RankOutput
from sgpu_magic.agent.ranks.stop import Terminator
from sgpu_magic.agent.reports import EventReports
from sgpu_magic.agent.run_registry import RunRegistry
from sgpu_magic.agent.runs.execution import Execution
from sgpu_magic.agent.runs.execution_kinds import FreshRun, SessionCell
from sgpu_magic.agent.runs.rank_questions import Questions
from sgpu_magic.agent.runs.run_files import AttemptFiles
from sgpu_magic.agent.runs.run_memory import RunMemory
from sgpu_magic.agent.runs.session import NodeSession
from sgpu_magic.agent.runs.session_logs import SessionLogs
from sgpu_magic.agent.runs.session_repair import SessionRepair
from sgpu_magic.agent.standby_groups import StandbyGroups
from sgpu_magic.agent.watch.sampling import RunSampler, Sampling
from sgpu_magic.agent.watch.stack_taking import StackTaker

FRESH = (
    at(RunLauncher, RunLauncher.launch),
    at(RunLauncher, RunLauncher._start),
    at(StandbyGroups, StandbyGroups.take),
    at(Group, Group.forked),
    at(Group, Group._on_message),
    at(Group, Group._wrote),
    at(FreshRun, FreshRun.start),
    at(FreshRun, FreshRun.on_rank_message),
    at(Execution, Execution._all_there),
    at(Execution, Execution._on_result),
    at(Execution, Execution._end),
    at(RankOutput, RankOutput.flush),
    at(RankOutput, RankOutput.drain),
    at(MemoryWatch, MemoryWatch.begin),
    at(RankOutcomes, RankOutcomes.last_word),
    at(AttemptFiles, AttemptFiles.describe),
    at(AttemptFiles, AttemptFiles.take_result),
    at(EventReports, EventReports.happened),
)
# of these, the one that may be called after a short run has ended
WHILE_IT_GOES_ON = (at(MemoryWatch, MemoryWatch.begin),)
# called after the run's end is reported
AFTER = (
    at(Group, Group.exited),
    at(FreshRun, FreshRun.rank_exited),
    at(FreshRun, FreshRun._release_ranks),
    at(FreshRun, FreshRun._finish_if_exited),
    at(AttemptFiles, AttemptFiles.ended),
    at(EventReports, EventReports.ranks_exited),
    at(RunRegistry, RunRegistry.run_exited),
    at(RunRegistry, RunRegistry.ranks_exited),
)
# called while the run goes on; a fault in these does not end the run
WATCHING = (
    at(RunSampler, RunSampler.begin),
    at(RunSampler, RunSampler.sample),
    at(Sampling, Sampling._tick),
    at(StandbyGroups, StandbyGroups.tend),
)
# the same, called after the run
SPARED = (
    at(RunRegistry, RunRegistry._replenish),
    at(RunRegistry, RunRegistry._keep),
    at(RunMemory, RunMemory.keep),
)
FAILING = (
    at(Execution, Execution._on_failure),
    at(Execution, Execution._decide),
    at(Terminator, Terminator.begin),
    at(Terminator, Terminator.end),
)
CELLS = (
    at(SessionCell, SessionCell.start),
    at(SessionCell, SessionCell.on_rank_message),
    at(SessionCell, SessionCell._settle),
    at(SessionCell, SessionCell._write_down),
    at(NodeSession, NodeSession.execute),
    at(NodeSession, NodeSession.cell_over),
    at(SessionLogs, SessionLogs.lend),
    at(SessionLogs, SessionLogs.take_back),
    at(None, send_cells),
)
SESSIONS = (
    at(NodeSession, NodeSession.start),
    at(NodeSession, NodeSession._connected),
    at(NodeSession, NodeSession._say_end),
    at(NodeSession, NodeSession._finish_if_exited),
    at(SessionRepair, SessionRepair.fail),
)
ASKED = (at(NodeSession, NodeSession.ask), at(Questions, Questions.answered), at(NodeSession, NodeSession.restart))
STACKS = (
    at(StackTaker, StackTaker._ask),
    at(StackTaker, StackTaker._poll),
    at(StackTaker, StackTaker._finish),
)
CALLBACKS = (*FRESH, *AFTER, *WATCHING, *SPARED, *FAILING, *CELLS, *SESSIONS, *ASKED, *STACKS)
# only these report to the pool
TOLD = (
    at(EventReports, EventReports.happened),
    at(EventReports, EventReports.ranks_exited),
    at(RunRegistry, RunRegistry.ranks_exited),
)
AT_ITS_END = (
    at(NodeSession, NodeSession._say_end),
    at(NodeSession, NodeSession._finish_if_exited),
    at(SessionRepair, SessionRepair.fail),
)
# these do not know their run
UNNAMED = (
    at(MemoryWatch, MemoryWatch.begin),
    at(RankOutcomes, RankOutcomes.last_word),
    at(Sampling, Sampling._tick),
    at(StandbyGroups, StandbyGroups.tend),
)
