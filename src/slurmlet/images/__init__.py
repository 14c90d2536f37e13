"""Image references, registries (through crane) and the store on the shared file system. Never runs a container."""
