"""A process of the job: ranks, signals, watchdog, exit codes, random generators, logging, files.

Imports no other package of the runtime.
"""
