"""Backend for nodes on this machine. Each node listens only on the loopback address, and is owned by a supervisor
process."""
