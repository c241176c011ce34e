"""Jobs that search for the parameters of a model."""
