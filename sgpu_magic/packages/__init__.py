"""Python packages that travel: what a kernel has, base environments, and how a node builds what it lacks."""
