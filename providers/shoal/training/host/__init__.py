"""Measure and control what a training process uses on its host, such as memory, CPUs, GPUs and network sockets."""
