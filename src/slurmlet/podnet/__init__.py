"""The pod's own network: docs/network.md says how the modules fit together. Standard library only, as all of the runner."""
