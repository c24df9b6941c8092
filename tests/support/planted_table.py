"""The callbacks of the agent in which faults are planted, by what triggers them.

All are public functions, since private ones may change; some raise only for a certain type of message.
"""

from planted_faults import at

from sgpu_magic.agent.environments import Environments
from sgpu_magic.agent.failures import RankOutcomes
from sgpu_magic.agent.launch import RunLauncher
from sgpu_magic.agent.memory_watch import MemoryWatch
from sgpu_magic.agent.ranks.group import Group
from sgpu_magic.agent.ranks.orders import send_cells
from sgpu_magic.agent.ranks.rank_output import RankOutput
from sgpu_magic.agent.ranks.rank_process import NotebookFrames, StackFile
from sgpu_magic.agent.ranks.shared_memory import remove_leftovers
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
from sgpu_magic.agent.session_lines import SessionLines
from sgpu_magic.agent.standby_groups import StandbyGroups
from sgpu_magic.agent.watch.run_watch import RunWatch
from sgpu_magic.agent.watch.sampling import RunSampler, Sampling
from sgpu_magic.agent.watch.shared_pages import SharedPages
from sgpu_magic.wire.events import RanksStarted, RunEnded
from sgpu_magic.wire.rank import CellFailed, Finished

FRESH = (
    at(RunLauncher.launch),
    at(Environments.needed),
    at(StandbyGroups.acquire),
    at(Group.forked),
    at(FreshRun.on_rank_message),
    at(Execution.rank_wrote),
    at(FreshRun.start),
    at(FreshRun.on_rank_message, Finished),
    at(RunWatch.start),
    at(RunWatch.end),
    at(RankOutput.flush),
    at(RankOutput.drain),
    at(MemoryWatch.begin),
    at(RankOutcomes.final_event),
    at(AttemptFiles.describe),
    at(AttemptFiles.take_result),
    at(EventReports.report),
)
# of these, the one that may be called after a short run has ended
WHILE_IT_GOES_ON = (at(MemoryWatch.begin),)
# called after the run's end is reported
AFTER = (
    at(Group.exited),
    at(FreshRun.rank_exited),
    at(Terminator.end),
    at(remove_leftovers),
    at(AttemptFiles.ended),
    at(EventReports.ranks_exited),
    at(RunRegistry.run_exited),
    at(RunRegistry.ranks_exited),
)
# called during the run; a fault in these does not end it
WATCHING = (
    at(RunSampler.begin),
    at(RunSampler.sample),
    at(SharedPages.counted_once),
    at(StandbyGroups.tend),
)
# the same, called after the run: before ranks are kept for the next one, and when its data is kept
SPARED = (
    at(RunRegistry.busy),
    at(RunMemory.keep),
    at(RunMemory.in_use),
)
FAILING = (
    at(FreshRun.on_rank_message, CellFailed),
    at(RunWatch.is_ending),
    at(Terminator.begin),
    at(Terminator.end),
)
CELLS = (
    at(SessionCell.start),
    at(SessionCell.on_rank_message),
    at(RunRegistry.on_event, RunEnded, after=True),
    at(AttemptFiles.describe),
    at(NodeSession.execute),
    at(NodeSession.on_cell_ended),
    at(SessionLogs.lend),
    at(SessionLogs.take_back),
    at(send_cells),
)
# called for a cell that comes over its session's line
LINES = (
    at(SessionLines.submit),
    at(SessionLines.report_now),
    at(EventReports.begin_unknown),
    at(EventReports.adopt),
    at(RunLauncher.launch),
    at(NodeSession.execute),
    at(SessionCell.start),
    at(Execution.on_order),
)
SESSIONS = (
    at(NodeSession.start),
    at(RunRegistry.on_event, RanksStarted),
    at(Sampling.end),
    at(remove_leftovers),
    at(SessionRepair.fail),
)
ASKED = (at(NodeSession.ask), at(Questions.answered), at(NodeSession.restart))
STACKS = (
    at(StackFile.forget),
    at(StackFile.faulthandler_text),
    at(NotebookFrames.upwards),
)
CALLBACKS = dict.fromkeys((*FRESH, *AFTER, *WATCHING, *SPARED, *FAILING, *CELLS, *LINES, *SESSIONS, *ASKED, *STACKS))
# only these report to the pool
TOLD = (
    at(EventReports.report),
    at(EventReports.ranks_exited),
    at(RunRegistry.ranks_exited),
)
AT_ITS_END = (
    at(Sampling.end),
    at(remove_leftovers),
    at(SessionRepair.fail),
)
# these do not know their run, or only the session
UNNAMED = (
    at(SessionLogs.take_back),
    at(SessionLines.submit),
    at(SessionLines.report_now),
    at(MemoryWatch.begin),
    at(RankOutcomes.final_event),
    at(SharedPages.counted_once),
    at(StandbyGroups.tend),
    at(remove_leftovers),
)
