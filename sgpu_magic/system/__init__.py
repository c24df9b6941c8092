"""What this package needs of the operating system: processes, memory, streams between processes, sockets and keys."""
