"""A user's own control plane: keys, ports, the components' command lines, and the supervisor that keeps them running."""
