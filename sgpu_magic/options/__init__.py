"""The options of runs and sessions, each defined once: name, reader, help text, and the interfaces that have it.

table           the table of options, and parsing into records
values          parsers of values: durations, memory, ranks, names, amounts
rank_lists      lists of ranks, such as `0,2-3`, `-1` and `::2`
option_records  records of what cells, calls and sessions request, and whether a session has it
strict_parser   the parser of all command lines, with suggestions for misspelled names
argparse_form   command lines: the magics and the `sgpu` command
python_form     `@distributed`, `map` and `connect`
notebook_job    what `sgpu run` passes to its notebook: defaults of options, parameters for widgets; the final value
job_form        `job.yaml`, `job.json` and `job.toml`, and how options of `sgpu run` override them
"""
