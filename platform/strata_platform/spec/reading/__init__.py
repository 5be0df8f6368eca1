"""From a file and overrides to a spec, and back to text: includes, environment variables, places of values."""
