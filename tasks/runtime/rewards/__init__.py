"""Rewards of generated answers: functions in processes of their own, functions that ship with Strata, reward models.

Nothing here loads torch by being imported: the processes of functions start in a fraction of a second.
"""
