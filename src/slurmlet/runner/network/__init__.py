"""The network as a pod sees it: its own, or its host's."""
