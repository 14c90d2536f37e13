"""The hub's part of the pod network: addresses, tables, policies, and telling all of it to every netd."""
