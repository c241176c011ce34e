from tests.training.ray_cluster import driver, rows, two_nodes

__all__ = ["driver", "rows", "two_nodes"]
