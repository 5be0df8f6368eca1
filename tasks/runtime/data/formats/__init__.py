"""Data formats: which columns a row has, and the documents that it becomes."""
