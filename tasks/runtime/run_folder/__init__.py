"""The run folder: its layout and lock, the completion record, format versions.

May import `process` only.
"""
