"""Which test files run the functions of a module: recorded by `make reached`, asked by `make tests-of FILE=...`."""
