"""Specs of jobs, which describe a training or a prediction as plain data that the store keeps as JSON."""
