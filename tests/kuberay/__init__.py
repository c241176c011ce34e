"""Kubernetes for tests: a real control plane, the real KubeRay operator, and nodes that run pods as processes."""
