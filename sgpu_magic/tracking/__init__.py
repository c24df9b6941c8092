"""Runs in MLflow: the one process that writes, and what a rank's own MLflow does.

__main__         the process that writes the runs of one pool to one store, or those that `sgpu sync` sends
writer_queue     the runs of one store, and when each is looked at
writer           writes one run, a step at a time
runs             what a run's events are in MLflow, its ranks' and devices' samples too
artifacts        the files of a run's directory that are kept with it
client           a store as the writer uses it
store            the default store
progress         `tracking.json`: how far a run's events are written
in_rank          a tracked cell in one of its ranks begins and ends; MLflow is changed there when it is imported
in_rank_cell     the cell: its place in MLflow, and what its code tells MLflow on its way to the agent
in_rank_fluent   `mlflow.start_run` and its like there
in_rank_store    the store behind them
"""
