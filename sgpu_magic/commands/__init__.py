"""What the `sgpu` command does, one module per group of commands. `sgpu_magic.cli` parses and prints.

pool             `sgpu pool status`, `sgpu pool stop`
runs             `sgpu runs`, `sgpu cancel`; how a run is named by the first digits of its id
logs             `sgpu logs`
ledger_file      the ledger, read beside a pool or without one
finding          what one check of `sgpu doctor` says
python_checks    this Python, its packages, and a real two-rank group
machine_checks   what the system offers: GPUs, memory, limits, names
place_checks     settings, directories, and the pool that lives in them
"""
