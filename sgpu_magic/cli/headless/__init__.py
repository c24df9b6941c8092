"""`sgpu run`: executes a notebook without a front end, from a shell, cron, Airflow or CI.

job           the job to run: options of the command and keys of a job file, validated; parameters
formats       reading notebooks: .ipynb, Databricks source, percent cells, jupytext; telling scripts apart
execution     runs the kernel cell by cell
outcome       cells inserted before the run; the exit code, the executed copy
script_shell  makes the kernel execute a script's cell as `python script` would
"""
