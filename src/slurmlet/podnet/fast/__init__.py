"""TCP at the host's own speed: trapped calls, host sockets in the place of the pod's."""
