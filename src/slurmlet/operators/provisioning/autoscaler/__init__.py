"""How many workers each WorkerSet should have, and which may go: pure, from facts alone (docs/decisions/0029)."""
