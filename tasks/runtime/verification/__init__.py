"""Does this model train right, on this data and this machine? `table.py` lists the checks; `strata verify` runs them.

May import every other package of the runtime.
"""
