"""The Helm chart's values as models; values.yaml, their JSON Schema and their reference are generated from them."""
