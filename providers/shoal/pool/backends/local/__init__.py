"""Backend for nodes on this machine. Each node is a Ray node on loopback, owned by a supervisor process."""
