"""Nodes on this machine: a supervisor process for each, which owns one Ray node on loopback."""
