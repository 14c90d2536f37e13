"""The cluster's own place on the pod network, on the login host: DNS, NodePorts, and the way in for the API server."""
