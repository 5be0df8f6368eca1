"""The description of a training run, and the tools around it. Never imports torch."""
