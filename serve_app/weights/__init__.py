"""The weights of the fleet: what is committed, how it gets there, and where it is kept."""
