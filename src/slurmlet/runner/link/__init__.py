"""The one connection to the hub, and what the runner tells over it."""
