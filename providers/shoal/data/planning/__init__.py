"""Plan which worker reads which rows: computed from the numbers in footers, without I/O."""
