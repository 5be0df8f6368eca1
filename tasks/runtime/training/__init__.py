"""The training run: build the job, train with the chosen framework, write the completion record.

May import every other package of the runtime but `evaluation`, `export` and `report`.
"""
