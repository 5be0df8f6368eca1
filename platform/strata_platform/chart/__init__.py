"""The Helm chart's values, described once: values.yaml, their schema and their reference are written from here."""
