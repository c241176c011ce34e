"""Memory, network and imports of a training process on its host."""
