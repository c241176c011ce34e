"""Train many models from one table: one spec per value of a column, and a summary of all results."""
