"""Python packages that travel: what a kernel has, base environments, and how a node builds what it lacks.

distributions       one installed distribution, where it came from; what a set of them is known by
snapshot            those of the running interpreter, how two such sets differ, what is loaded in another version
order               what a node is told to build: what the notebook has, or what `--env-version` means
lock                `pylock.toml`, kept by the environment's digest
requirement_files   requirements files and lock files as people write them; `requirements.txt` of ours
named_environments  the libraries of published base environments, and the environments that were saved
wheels              wheels made of installed packages and of editable projects
uv_command          running uv, and where it looks packages up
local_code          which of the user's own modules a run needs, and whether they are too large
code_files          the files below a directory that belong to its code, and archives of them
travel_checks       whether what travels goes together, and a node can import what a payload names
mismatches          packages that are known to break together; which NVIDIA driver a CUDA version needs
variables           which environment variables travel, and which of them are secrets
secrets             what is a secret, and how texts are kept clear of them
node/               a node's half: whether it has a run's environment, and a process that builds what it lacks
"""
