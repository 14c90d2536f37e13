"""Encryption of what pods say to each other between hosts, where the cluster asked for it (docs/network.md)."""
