"""The folder of a run: its layout and lock, the completion record, format versions.

May import `process` only.
"""
