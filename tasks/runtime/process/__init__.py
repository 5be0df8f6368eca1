"""One process of a job: ranks, signals, watchdog, exit codes, random number generators, logging.

Imports no other package of the runtime.
"""
