"""What ranks of a real job recorded: read, checked, put on one clock and joined into one graph (after dPRO)."""
