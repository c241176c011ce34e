"""Specs of jobs: what to train or to predict, and how, as plain data that the store keeps as JSON."""
