"""Images: references, pulls by crane, the store on the shared file system."""
