"""What a training process may use of its host: memory, network, imports."""
