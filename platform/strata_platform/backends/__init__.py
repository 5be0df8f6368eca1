"""Where runs go: processes of this machine, or Flyte on Kubernetes."""
