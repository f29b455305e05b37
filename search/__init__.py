"""Decides: reads a question, covers its space, and tells people the answer.

The only room that may import every other. `cli.py` is the door for people; `pool.py` is the only module that knows Ray,
`study.py` the only one that knows Optuna. Importing this package loads neither.
"""
