"""NodePorts and hostPorts: ports of this host that lead to pods."""
