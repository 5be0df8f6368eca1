"""The steps of a run as plain functions, free of Flyte; `tasks` wraps them for Flyte 1, `tasks.flyte2` for Flyte 2.

They take and return folders of this machine. An error that another attempt may mend is a `Retry`.
"""
