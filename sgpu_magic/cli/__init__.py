"""The `sgpu` command: one module for each command or group of commands, with its options and its work.

__main__         `python -m sgpu_magic.cli`
main             the top-level parser, exit codes, the table of commands, shared option types
status           `sgpu status`, `sgpu pool status`
runs             `sgpu runs`, `sgpu cancel`, `sgpu detach`, `sgpu stacks`
usage            `sgpu usage`
forwarding       `sgpu port-forward`
logs             `sgpu logs`
sync             `sgpu sync`: sends to MLflow what is not there yet
copying          `sgpu cp`
environments     `sgpu env`
pools            `sgpu pool stop`, `add`, `list`, `remove`, and `sgpu types`
serving          `sgpu pool serve`, `keygen`, `authorize`, `revoke`
ray_deployment   `sgpu pool deploy`, `undeploy`
run              `sgpu run`
replay           `sgpu replay`: launches a run again from its directory
torchrun         `sgpu torchrun`: torchrun's options for `sgpu run`
jobs             `sgpu jobs`, and the records of the jobs that `sgpu run` executes
headless/        executing a notebook without a front end
completion       completion of the command in shells
json_records     the documents of `--json`
json_form        runs, pools and amounts as records of these documents

doctor           `sgpu doctor`: all checks in order; those of settings, directories and pools
python_checks    checks of this Python, its packages and GPUs, with a real two-rank group
machine_checks   checks of the system: host name, memory files, process control, limits
pool_checks      each step of the way to a pool on another machine
far_checks       runs there, over ssh: the same checks
finding          the result of a check
"""
