"""Names of other products, so that code for them runs with one changed import for each product.

Each module has the names, the arguments and the default values of one product. They are aliases of shoal's own classes
and functions where both are the same.
"""
