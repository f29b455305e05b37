"""One module per command of `search`: takes parsed arguments, prints the answer, returns the exit code.

`cli.py` imports the chosen one only. What a command computes lies in the other modules; these speak with people.
"""
