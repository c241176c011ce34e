"""A gang: the workers of one training, all or none, and the first cause when one of them fails."""
