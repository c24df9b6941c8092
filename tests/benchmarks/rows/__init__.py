"""One module per group of rows; each row is a function from `Bench` to `Row`."""
