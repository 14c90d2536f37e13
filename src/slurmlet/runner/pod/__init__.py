"""One pod in its job: claim, setup, lifecycle, limits."""
