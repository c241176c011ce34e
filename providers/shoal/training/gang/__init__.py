"""Start the workers of one training together (a gang), run functions on them, and find the cause of a failure."""
