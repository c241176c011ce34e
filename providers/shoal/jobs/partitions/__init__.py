"""Call a function for each partition of a dataset: the rows with one value of a column, or of several columns."""
