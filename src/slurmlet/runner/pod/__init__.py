"""One pod in its job: claim, sandbox, link, lifecycle, report."""
