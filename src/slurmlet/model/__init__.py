"""Pure knowledge: pod → job, states, quantities, environment. No I/O, no clock, no imports from rooms above."""
