"""Rights of Flyte's service account that runs need, as charts/strata-stack and charts/strata give them."""

WATCHED = (("flyte.lyft.com", "flyteworkflows"), ("", "pods"), ("", "podtemplates"), ("kubeflow.org", "pytorchjobs"))
"""API group and resource of all that it lists and watches in the whole cluster."""

WRITTEN = (
    ("flyte.lyft.com", "flyteworkflows", ("create", "update", "delete")),
    ("", "pods", ("create", "get", "delete")),
    ("kubeflow.org", "pytorchjobs", ("create", "get", "delete")),
)
"""API group, resource and verbs of all that it does in tenants' namespaces."""
