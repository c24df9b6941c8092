"""From a cell to what it needs: the names it reads, found in the notebook's namespace."""
