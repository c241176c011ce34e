"""Jobs that predict how many nodes of their pool a training needs."""
