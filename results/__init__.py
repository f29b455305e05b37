"""Remembers what a search found: run folders, Pareto fronts, capacity plans and reports. Predicts nothing itself."""
