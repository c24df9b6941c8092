"""Runs in the process that submits them: submission, following, delivery of results. Used by magics and functions.

kernel_context   the pools, views and settings of this process, shared by magics and Python functions
handle           `Run`: the handle of a run in the background; also trims the tracebacks that callers see
notebook         facts about the notebook and its cells; outputs below cells
kernel_restarts  distinguishes a restart of the kernel from its shutdown
notices          notices below cells, published from any thread
git_state        the state of the notebook's git repository
packages         this process's packages, reported to the pool
environments     descriptions of environments: files in a run's directory, the report of `%sgpu_env`
pools_status     the status of several pools in one view, and the live output of `%sgpu_status`
submit/          submission of cells and calls
follow/          a run's events until its end, and its results
sessions/        ranks that stay alive between cells
choice/          the notebook's own choice of devices and packages
replay/          replays of recorded runs
"""
