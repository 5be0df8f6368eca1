"""Rules across the fields of a spec: which settings contradict each other, and the way out."""
