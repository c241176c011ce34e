"""The kinds of jobs: a folder for each, with its spec, its engine, and what its driver and its caller do."""
