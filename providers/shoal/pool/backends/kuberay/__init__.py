"""Backend for Ray clusters on Kubernetes, whose pods KubeRay's operator starts and ends."""
