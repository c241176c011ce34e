"""Control how a training process uses its host: its memory, its network sockets and its imports."""
