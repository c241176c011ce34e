"""Ray clusters that others run: watched and asked for nodes over HTTP."""
