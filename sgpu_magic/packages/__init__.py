"""Python packages that travel: what a kernel has, base environments, and how a node builds what it lacks.

distributions       one installed distribution, where it came from; what a set of them is known by
snapshot            those of the running interpreter, how two such sets differ, what is loaded in another version
order               from what the notebook has to what a node is told to build, and what of it is known to break
lock                `pylock.toml`, kept by the environment's digest
requirements        `requirements.txt`, as it is written into a run's directory
requirement_files   requirements files and lock files as people write them
bases               `--env-version`: which packages the ranks have, when they are not the notebook's own
named_environments  the libraries of published base environments, and the environments that were saved
wheels              wheels made of installed packages and of editable projects
uv_command          running uv, and where it looks packages up
local_code          which of the user's own modules a run needs
file_tree           the files below a directory that belong to its code
bundle              local code as archives
references          whether a node can import what a payload names
mismatches          packages that are known to break together
cuda                which NVIDIA driver a CUDA version needs; a node's inventory reads it, and nothing else of here
variables           which environment variables travel, and which of them are secrets
secrets             what is a secret, and how texts are kept clear of them
node/               a node's half: whether it has a run's environment, and a process that builds what it lacks
"""
