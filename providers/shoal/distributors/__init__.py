"""The public training API. One module per library, so that importing one loads nothing of the others."""
