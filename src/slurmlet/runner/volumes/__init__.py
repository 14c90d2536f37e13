"""A pod's volumes on its node."""
