"""Jobs that predict the rows of a dataset."""
