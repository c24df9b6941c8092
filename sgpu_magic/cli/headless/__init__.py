"""`sgpu run`: a notebook executed without a front end, from a shell, cron, Airflow or CI.

job        what is to be run: the command's options and a job file's keys, checked; parameters
formats    a notebook from its file: .ipynb, Databricks source, percent, jupytext's; what is a script
cells      where the notebook's cells run, and what is put before them
execution  the kernel, cell by cell
outcome    the executed copy, how it ended as an exit code, and what a failed cell shows
"""
