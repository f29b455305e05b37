"""Cost: the only room that divides by a rate. Ops in, seconds out, every price with its source."""
