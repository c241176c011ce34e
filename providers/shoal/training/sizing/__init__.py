"""Predict the memory of workers, by term, and the number of nodes that a training needs."""
