"""Move unfinished jobs on: `look` at an attempt, `decide` what to do with it, and act (`acts`), in `rounds`."""
