"""Gangs: start the workers of one training all together, run functions on them, and find the cause of a failure."""
