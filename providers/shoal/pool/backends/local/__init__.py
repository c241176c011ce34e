"""Backend for nodes on this machine. Each node is a Ray node on the loopback address, owned by a supervisor process."""
