"""What a site offers and lacks: collects facts here and (through a job) on a node, judges them. Changes nothing."""
