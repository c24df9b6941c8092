"""Runs in MLflow: the one process that writes, and what a rank's own MLflow does.

__main__        the process that writes the runs of one pool to one store
writer_queue    the runs of one store, and when each is looked at
writer          writes one run, a step at a time
runs            what a run's events are in MLflow
system_metrics  the same of what its ranks and devices did
artifacts       the files of a run's directory that are kept with it
client          a store as the writer uses it
store           the default store
progress        `tracking.json`: how far a run's events are written
sync            the process of `sgpu sync`, which sends what is unsent
in_rank         a tracked run in one of its ranks: what is changed of MLflow there, and when
in_rank_cell    the tracked cell, and what its code tells MLflow on its way to the agent
in_rank_fluent  `mlflow.start_run` and its like there
in_rank_store   the store behind them
"""
