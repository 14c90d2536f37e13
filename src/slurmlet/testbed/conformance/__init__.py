"""Upstream's own conformance suite on the testbed, as a second opinion: build it, make its images, run it, report.

Needs the testbed (root). Never changes a spec: the suite is the unmodified one of the pinned Kubernetes.
"""
