"""The sections of a spec: their fields, defaults, and what a field takes. Short sections stand in `run_spec`."""
