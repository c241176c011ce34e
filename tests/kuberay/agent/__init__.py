"""A node of a Kubernetes cluster for tests: runs each container as a process, without an engine for containers.

A container has namespaces for processes, mounts, the host name and, with the other containers of its pod, the network.
It sees the file system of this machine, but what it writes is its own; `/tmp`, `/dev/shm`, `/proc` and `/etc/hosts`
are its own from the start. The name of an image is looked up in a table of Python environments.

Faults are ordered with annotations on a pod: see `pod.ORDER`. An image that is not in the table cannot be pulled.
"""
