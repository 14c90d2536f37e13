"""Linux calls and the event loop that everything in a job stands on. Standard library only, Python ≥ 3.9."""
