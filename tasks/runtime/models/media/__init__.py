"""Models that see images or hear audio: what they take beside tokens, and how tokens attend to it."""
