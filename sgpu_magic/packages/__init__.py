"""Packages, local code and environment variables that a run takes to its nodes, and how a node builds an environment.

distributions          installed distributions, their origin and their files' hashes
environment_digest     the digest of a set of distributions, by which environments are known
snapshot               the running interpreter's distributions, differences between snapshots, stale loaded modules
environment_request    the environment that a node is asked to build: the notebook's own, or that of `--env-version`
lock                   `pylock.toml`, cached by the environment's digest
requirement_files      reads users' requirements files and lock files; writes a run's `requirements.txt`
named_environments     the published base environments, and environments saved under a name
wheels                 wheels built from installed packages and from editable projects
uv_command             running uv, and which package index it uses
local_code             which of the user's own modules a run needs, and the limit on their size
code_files             the code files below a directory, and archives of them
travel                 checks of a run's packages before it is submitted to another machine
module_references      modules that a payload names, and whether ranks have them
environment_variables  the environment variables that are sent to ranks on other machines
mismatches             packages known to break together
unreadable_values      pickled values that an older version of their package can't read
nvidia_driver          the NVIDIA driver that a CUDA version needs
package_metadata       metadata of installed packages that decide whether they work together
secrets                detecting secrets, and redacting them in text
node/                  the node's side: the environments it has built, and the process that builds a missing one
"""
