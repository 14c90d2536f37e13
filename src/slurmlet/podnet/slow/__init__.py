"""Packets: the pod's TUN device, UDP and ICMP, and TCP where the fast path cannot be."""
