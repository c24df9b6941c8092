"""Tracking runs in MLflow: the one process that writes to a store, and MLflow in the ranks.

__main__        the process that writes one pool's runs to one MLflow store, or sends the runs of `sgpu sync`
writer_queue    the runs of one store, and the schedule of their steps
writer          writes one run to its store, step by step, with the files of its directory as artifacts
artifacts       files of a run that become artifacts
runs            converts a run's events to MLflow's params, tags, metrics and system metrics
system_metrics  system metrics of a run, under the names that MLflow gives them
keys            names that MLflow accepts as keys of metrics, parameters and tags
client          the writer's client of an MLflow store
store           the default store on disk; messages between `sgpu sync` and the process that sends
in_rank         start and end of a tracked cell in a rank; patches MLflow when it is imported
in_rank_cell    the tracked cell: its MLflow run, and what its code logs, sent to the agent in batches
in_rank_fluent  replacements for `mlflow.start_run` and the like in a rank
in_rank_store   the tracking store that a rank's MLflow uses
"""
