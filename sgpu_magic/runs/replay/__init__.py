"""A run launched again from its directory: same code, data and packages, and what differs is said."""
