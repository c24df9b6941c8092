"""Where agents run: `local` is this machine. One contract (`base`), one folder or module per backend."""
