"""What a site offers, what slurmlet makes of it, and what is lost without it."""
