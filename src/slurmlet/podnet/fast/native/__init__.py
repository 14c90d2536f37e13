"""The hot spot of netd in C, where the site has a compiler: docs/decisions/0015. Everything works without it."""
