"""Every option of a run or session once: its name, how it is read, its sentence of help, and where it may stand.

table          the options, and from what was written to what is asked for
values         values as people write them: durations, memory, ranks, names, amounts
asked          what cells, calls and sessions ask for
defaults       what `sgpu run` gives the runs of its notebook
argparse_form  the lines of magics and the `sgpu` command; `%%distributed` and its like
python_form    `@distributed`, `map` and `connect`
job_form       `job.yaml`, `job.json`, `job.toml`, and what the line of `sgpu run` changes of them
"""
