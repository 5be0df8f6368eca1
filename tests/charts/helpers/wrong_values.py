"""Values files that are wrong, and the path of the key that is to be named."""

import yaml

TENANT = "project: p, domains: [d]"
QUEUE = "name: q"

# For the schema: of a wrong kind, out of range, or not there at all. The path is as Helm prints it.
REFUSED_BY_THE_SCHEMA = {
    "a key that does not exist": ("tenant: []", "tenant"),
    "a misspelt section": ("queus: {enabled: true}", "queus"),
    "a misspelt key of a section": ("image: {repo: x}", "/image", "repo"),
    "a misspelt key of a tenant": (f"tenants: [{{{TENANT}, podSecurty: baseline}}]", "/tenants/0", "podSecurty"),
    "a misspelt key deep in a tenant": (
        f"tenants: [{{{TENANT}, podTemplate: {{caches: {{triton: {{size: 1Gi}}}}}}}}]",
        "/tenants/0/podTemplate/caches/triton",
        "size",
    ),
    "tenants by name": ("tenants: {p: {domains: [d]}}", "/tenants"),
    "a tenant without a project": ("tenants: [{domains: [d]}]", "/tenants/0", "project"),
    "a tenant without domains": ("tenants: [{project: p}]", "/tenants/0", "domains"),
    "a tenant with no domain": ("tenants: [{project: p, domains: []}]", "/tenants/0/domains"),
    "one domain as text": ("tenants: [{project: p, domains: d}]", "/tenants/0/domains"),
    "a project in capitals": ("tenants: [{project: Language, domains: [d]}]", "/tenants/0/project"),
    "a domain with a dot": ("tenants: [{project: p, domains: [d.e]}]", "/tenants/0/domains/0"),
    "a project that is a number": ("tenants: [{project: 7, domains: [d]}]", "/tenants/0/project"),
    "an unknown pod security level": ("tenantDefaults: {podSecurity: strict}", "/tenantDefaults/podSecurity"),
    "looks at GPUs rarer than the alert awaits them": ("nodeHealth: {interval: 15m}", "/nodeHealth/interval"),
    "yes for true, quoted": ('tenantDefaults: {createNamespace: "yes"}', "/tenantDefaults/createNamespace"),
    "a namespace label with a space": ("tenantDefaults: {labels: {team: a b}}", "/tenantDefaults/labels/team"),
    "a label key with a space": ('tenantDefaults: {labels: {"te am": a}}', "/tenantDefaults/labels", "te am"),
    "a member of an unknown kind": (
        "tenantDefaults: {members: [{kind: Team, name: x}]}",
        "/tenantDefaults/members/0/kind",
    ),
    "a member without a name": ("tenantDefaults: {members: [{kind: User}]}", "/tenantDefaults/members/0", "name"),
    "a queue without its cluster queue": (
        f"tenantDefaults: {{queues: [{{{QUEUE}}}]}}",
        "/tenantDefaults/queues/0",
        "clusterQueue",
    ),
    "a quota in words": ("tenantDefaults: {quota: {pods: many}}", "/tenantDefaults/quota/pods"),
    "a negative quota": ("tenantDefaults: {quota: {pods: -1}}", "/tenantDefaults/quota/pods"),
    "a quota with a wrong unit": (
        "tenantDefaults: {limits: {max: {memory: 8GB}}}",
        "/tenantDefaults/limits/max/memory",
    ),
    "a fraction without quotes": (
        "tenantDefaults: {limits: {default: {cpu: 0.5}}}",
        "/tenantDefaults/limits/default/cpu",
    ),
    "addresses without a length": (
        "tenantDefaults: {network: {objectStore: [{cidr: 10.0.0.1}]}}",
        "/tenantDefaults/network/objectStore/0/cidr",
    ),
    "a port out of range": (
        "tenantDefaults: {network: {flyte: [{namespace: flyte, ports: [{port: 70000}]}]}}",
        "/tenantDefaults/network/flyte/0/ports/0/port",
    ),
    "a port as a bare number": (
        "tenantDefaults: {network: {flyte: [{namespace: flyte, ports: [8089]}]}}",
        "/tenantDefaults/network/flyte/0/ports/0",
    ),
    "an unknown protocol": (
        "tenantDefaults: {network: {dns: [{namespace: n, ports: [{port: 53, protocol: udp}]}]}}",
        "/tenantDefaults/network/dns/0/ports/0/protocol",
    ),
    "root": ("tenantDefaults: {podTemplate: {runAsUser: 0}}", "/tenantDefaults/podTemplate/runAsUser"),
    "a grace period too short for a checkpoint": (
        "tenantDefaults: {podTemplate: {terminationGracePeriodSeconds: 5}}",
        "/tenantDefaults/podTemplate/terminationGracePeriodSeconds",
    ),
    "a relative working directory": (
        "tenantDefaults: {podTemplate: {workingDir: app}}",
        "/tenantDefaults/podTemplate/workingDir",
    ),
    "environment as Kubernetes has it": (
        "tenantDefaults: {podTemplate: {env: [{name: A, value: b}]}}",
        "/tenantDefaults/podTemplate/env",
    ),
    "a variable that is a number": (
        "tenantDefaults: {podTemplate: {env: {OMP_NUM_THREADS: 1}}}",
        "/tenantDefaults/podTemplate/env/OMP_NUM_THREADS",
    ),
    "a variable with a dash": (
        "tenantDefaults: {podTemplate: {env: {HF-HOME: x}}}",
        "/tenantDefaults/podTemplate/env",
        "HF-HOME",
    ),
    "a host path": (
        "tenantDefaults: {podTemplate: {volumes: [{name: v, hostPath: /data, mountPath: /data}]}}",
        "/tenantDefaults/podTemplate/volumes/0",
        "hostPath",
    ),
    "a toleration with an unknown effect": (
        "tenantDefaults: {podTemplate: {tolerations: [{key: k, effect: NoScheduling}]}}",
        "/tenantDefaults/podTemplate/tolerations/0/effect",
    ),
    "a cache with a wrong size": (
        "tenantDefaults: {podTemplate: {caches: {huggingFace: {sizeLimit: 200 GiB}}}}",
        "/tenantDefaults/podTemplate/caches/huggingFace/sizeLimit",
    ),
    "a path that ends in a slash": (
        "tenantDefaults: {podTemplate: {volumes: [{name: v, claim: c, mountPath: /dev/shm/}]}}",
        "/tenantDefaults/podTemplate/volumes/0/mountPath",
    ),
    "the whole file system": (
        "tenantDefaults: {podTemplate: {volumes: [{name: v, claim: c, mountPath: /}]}}",
        "/tenantDefaults/podTemplate/volumes/0/mountPath",
    ),
    "a path that leads elsewhere": (
        "tenantDefaults: {podTemplate: {volumes: [{name: v, claim: c, mountPath: /data/../dev}]}}",
        "/tenantDefaults/podTemplate/volumes/0/mountPath",
    ),
    "a mask of 33 bits": (
        "tenantDefaults: {network: {objectStore: [{cidr: 10.0.0.0/33}]}}",
        "/tenantDefaults/network/objectStore/0/cidr",
    ),
    "an address of 256": (
        "tenantDefaults: {network: {objectStore: [{cidr: 10.0.256.0/24}]}}",
        "/tenantDefaults/network/objectStore/0/cidr",
    ),
    "a mask of 129 bits": (
        "tenantDefaults: {network: {objectStore: [{cidr: 'fd00::/129'}]}}",
        "/tenantDefaults/network/objectStore/0/cidr",
    ),
    "a quota of what Kubernetes does not count": (
        "tenantDefaults: {quota: {gpus: 4}}",
        "/tenantDefaults/quota",
        "gpus",
    ),
    "a quota that Kubernetes ignores": (
        "tenantDefaults: {quota: {nvidia.com/gpu: 4}}",
        "/tenantDefaults/quota",
        "nvidia.com/gpu",
    ),
    "a tag with a blank": ("image: {tag: 'v1 '}", "/image/tag"),
    "a repository with a tag": ("image: {repository: 'registry.example/strata:1'}", "/image/repository"),
    "a store without a scheme": ("kernels: {store: {url: bucket/kernels, secret: k}}", "/kernels/store/url"),
    "a topology without levels": ("queues: {topologies: [{name: t, levels: []}]}", "/queues/topologies/0/levels"),
    "a flavor without a name": ("queues: {flavors: [{nodeLabels: {a: b}}]}", "/queues/flavors/0", "name"),
    "a taint with an unknown effect": (
        "queues: {flavors: [{name: f, nodeTaints: [{key: k, effect: Never}]}]}",
        "/queues/flavors/0/nodeTaints/0/effect",
    ),
    "a cluster queue without quotas": (
        "queues: {clusterQueues: [{name: q, quotas: []}]}",
        "/queues/clusterQueues/0/quotas",
    ),
    "a quota as a bare number": (
        "queues: {clusterQueues: [{name: q, quotas: [{flavor: f, resources: {cpu: 4}}]}]}",
        "/queues/clusterQueues/0/quotas/0/resources/cpu",
    ),
    "a quota without its size": (
        "queues: {clusterQueues: [{name: q, quotas: [{flavor: f, resources: {cpu: {borrowingLimit: 4}}}]}]}",
        "/queues/clusterQueues/0/quotas/0/resources/cpu",
        "nominal",
    ),
    "an unknown preemption": (
        "queues: {clusterQueues: [{name: q, preemption: {withinClusterQueue: Always}, "
        "quotas: [{flavor: f, resources: {cpu: {nominal: 1}}}]}]}",
        "/queues/clusterQueues/0/preemption/withinClusterQueue",
    ),
    "an unknown strategy": (
        "queues: {clusterQueues: [{name: q, strategy: FIFO, quotas: [{flavor: f, resources: {cpu: {nominal: 1}}}]}]}",
        "/queues/clusterQueues/0/strategy",
    ),
    "a priority in words": ("queues: {priorities: [{name: p, value: high}]}", "/queues/priorities/0/value"),
    "a priority that is too large": (
        "queues: {priorities: [{name: p, value: 3000000000}]}",
        "/queues/priorities/0/value",
    ),
    "a model with a comma": ("kernels: {bake: {models: ['a,b']}}", "/kernels/bake/models/0"),
    "no architecture": ("kernels: {bake: {archs: []}}", "/kernels/bake/archs"),
    "a duration without a unit": ("observability: {alerts: {stalledAfter: 15}}", "/observability/alerts/stalledAfter"),
    "no port for a second process": ("observability: {port: 65535}", "/observability/port"),
    "a share of more than all": ("observability: {alerts: {dataWait: 20}}", "/observability/alerts/dataWait"),
    "a price of an unknown kind of GPU": ("prices: {gpus: {H200: 3.5}}", "/prices/gpus", "H200"),
    "a price in words": ("prices: {gpus: {h200: 3.50 USD}}", "/prices/gpus/h200"),
    "a negative price": ("prices: {gpus: {h200: -1}}", "/prices/gpus/h200"),
    "a price outside of the table": ("prices: {h200: 3.5}", "/prices", "h200"),
    "an address without a port": ("tests: {reachable: [minio.minio]}", "/tests/reachable/0"),
    "an IPv6 address without brackets": ("tests: {reachable: ['fd00::1:443']}", "/tests/reachable/0"),
    "a byte with a zero before it": (
        "tenantDefaults: {network: {objectStore: [{cidr: 10.08.0.0/16}]}}",
        "/tenantDefaults/network/objectStore/0/cidr",
    ),
    "an unknown pull policy": ("image: {pullPolicy: Sometimes}", "/image/pullPolicy"),
}

_SHARE = "{name: q, quotas: [{flavor: f, resources: {cpu: {nominal: 1}}}]}"
_CLUSTER_QUEUE = f"clusterQueues: [{_SHARE}]"
_QUEUE = "{name: q, clusterQueue: q}"
_VOLUME = "{name: %s, claim: c, mountPath: %s}"
_TWO_WAYS = "{key: k, operator: Exists, value: v}"
_MACHINES = f"queues: {{flavors: [{{name: f}}], {_CLUSTER_QUEUE}}}"

_NO_RESOURCE = "Kubernetes has no such resource; write cpu, memory, ephemeral-storage"
_NO_RANGE = "is not a range of addresses; write one such as 10.20.0.0/16 or fd00::/64"
_THE_CHARTS = "labels of app.kubernetes.io and helm.sh are the chart's own; take one with a domain of yours"
_NO_VOLUME = "cannot be a volume: the container runtime fills /dev, /proc and /sys"


def _tenant(**settings):
    return yaml.safe_dump({"queues": {"required": False}, "tenants": [{"project": "p", "domains": ["d"], **settings}]})


def _volumes(*paths):
    return [{"name": f"v{number}", "claim": "c", "mountPath": path} for number, path in enumerate(paths)]


def _ranges(*cidrs):
    return _tenant(network={"others": [{"cidr": cidr} for cidr in cidrs]})


# For the templates: wrong together, or with a way out to be named. What the message has to say.
REFUSED_BY_THE_TEMPLATES = {
    "old runs of nowhere": ("retention: {runs: 30d}", "retention.folders: empty"),
    "runs to be ended by nobody": ("queues: {timeout: {after: 2h}}", "queues.timeout.flyte: empty"),
    "a queue on nothing": (f"tenants: [{{{TENANT}, queues: [{{name: q, clusterQueue: shared}}]}}]\n{_MACHINES}",
        'tenants (p-d).queues (q).clusterQueue: there is no queues.clusterQueues entry "shared"; there are: q'),
    "a flavor that is not there": (f"queues: {{{_CLUSTER_QUEUE}}}",
        'queues.clusterQueues (q).quotas: there is no queues.flavors entry "f"; there are: none'),
    "a topology that is not there": ("queues: {flavors: [{name: f, nodeLabels: {a: b}, topology: t}]}",
        'queues.flavors (f).topology: there is no queues.topologies entry "t"'),
    "a topology of no nodes": ("queues: {topologies: [{name: t, levels: [rack]}], flavors: [{name: f, topology: t}]}",
        "queues.flavors (f).nodeLabels"),
    "a cycle of cohorts": ("queues: {cohorts: [{name: a, parent: b}, {name: b, parent: a}]}",
        'queues.cohorts (a).parent: "b" is below this cohort itself'),
    "an admission check that is not there": ("queues: {flavors: [{name: f}], clusterQueues: [{name: q, "
        "admissionChecks: [{name: nodes}], quotas: [{flavor: f, resources: {cpu: {nominal: 1}}}]}]}",
        'queues.clusterQueues (q).admissionChecks: there is no entry "nodes" in queues.provisioning'),
    "an admission check of a flavor that the queue has not": ("queues: {flavors: [{name: f}], "
        "provisioning: [{name: nodes, className: c}], clusterQueues: [{name: q, "
        "admissionChecks: [{name: nodes, flavors: [g]}], quotas: [{flavor: f, resources: {cpu: {nominal: 1}}}]}]}",
        'queues.clusterQueues (q).admissionChecks (nodes).flavors: the queue has no quota in "g", only in: f'),
    "two checks of one name": ("queues: {provisioning: [{name: a, className: c}], "
        "multiKueue: [{name: a, clusters: [{name: w, secret: s}]}]}",
        "queues.provisioning and queues.multiKueue (a): the name is taken"),
    "a cluster twice": ("queues: {multiKueue: [{name: a, clusters: [{name: w, secret: s}, {name: w, secret: t}]}]}",
        "queues.multiKueue.clusters (w): the name is taken"),
    "huge pages alone": ("queues: {required: false}\ntenants: [{project: p, domains: [d], podTemplate: {variants: "
        "[{name: v, resources: {hugepages-2Mi: 1Gi}}]}}]",
        "tenants (p-d).podTemplate.variants (v).resources.hugepages-2Mi: Kubernetes takes huge pages beside cpu"),
    "a bandwidth of one node": ("tests: {allReduce: {nodes: 1}}", "tests.allReduce.nodes: 1, but the test measures"),
    "a bandwidth without a queue": ("tests: {allReduce: {nodes: 2}}",
        "tests.allReduce.nodes: 2, but no tenant has a queue"),
    "flavors of other resources": ("queues: {flavors: [{name: f}, {name: g}], clusterQueues: [{name: q, quotas: ["
        "{flavor: f, resources: {cpu: {nominal: 1}}}, {flavor: g, resources: {memory: {nominal: 1}}}]}]}",
        "queues.clusterQueues (q).quotas (g).resources: all flavors of a queue name the same resources"),
    "borrowing from nobody": ("queues: {flavors: [{name: f}], clusterQueues: [{name: q, quotas: ["
        "{flavor: f, resources: {cpu: {nominal: 1, borrowingLimit: 0}}}]}]}",
        "queues.clusterQueues (q).quotas.resources.cpu.borrowingLimit: a queue without a cohort shares nothing"),
    "borrowing without taking back": ("queues: {flavors: [{name: f}], clusterQueues: [{name: q, cohort: c, preemption: "
        "{reclaimWithinCohort: Never, borrowWithinCohort: LowerPriority}, "
        "quotas: [{flavor: f, resources: {cpu: {nominal: 1}}}]}]}",
        "queues.clusterQueues (q).preemption.borrowWithinCohort"),
    "a tenant of the cluster's own": ("tenants: [{project: kube, domains: [system]}]",
        "tenants (kube-system): the namespace kube-system belongs to the cluster"),
    "a tenant where Kueue is": ("tenants: [{project: kueue, domains: [system]}]",
        "tenants (kueue-system): the namespace kueue-system belongs to the cluster"),
    "everybody as a member": (f"tenants: [{{{TENANT}, members: [{{kind: Group, name: 'system:authenticated'}}]}}]",
        "tenants (p-d).members (system:authenticated): Kubernetes gives this name to accounts"),
    "a part of Kubernetes as a member": (
        f"tenants: [{{{TENANT}, members: [{{kind: User, name: 'system:kube-scheduler'}}]}}]",
        "tenants (p-d).members (system:kube-scheduler)"),
    "labels against pod security": (
        f"tenants: [{{{TENANT}, labels: {{pod-security.kubernetes.io/enforce: privileged}}}}]",
        "tenants (p-d).labels.pod-security.kubernetes.io/enforce: the chart sets this label itself"),
    "a cache in two places": (f"tenants: [{{{TENANT}, podTemplate: {{env: {{TRITON_CACHE_DIR: /x}}}}}}]",
        "tenants (p-d).podTemplate.env.TRITON_CACHE_DIR: the chart sets this variable by "
        "podTemplate.caches.triton.path"),
    "no queue where one is required": (f"tenants: [{{{TENANT}}}]",
        "tenants (p-d).queues: empty, but queues.required rejects every run that names no queue"),
    "large pods of no queue that are Strata's": ("queues: {unqueuedLimits: {cpu: 4}}",
        "queues.unqueuedLimits.cpu: 4 is less than 8, which Strata's tasks may use"),
    "two tenants of one name": ("tenants: [{project: a-b, domains: [c]}, {project: a, domains: [b-c]}]",
        "tenants (a-b-c): the namespace appears twice"),
    "a name that is too long": (f"tenants: [{{project: {'p' * 40}, domains: [{'d' * 30}]}}]",
        "the namespace's name has 71 letters"),
    "a template that Flyte does not know": (f"tenants: [{{{TENANT}, podTemplate: {{name: ours}}}}]",
        'tenants (p-d).podTemplate.name: Flyte starts the pods of all tenants from one name, "strata"'),
    "a variable of the chart's in the first of two variants": (
        f"queues: {{required: false}}\ntenants: [{{{TENANT}, podTemplate: {{variants: ["
        "{name: one, env: {HF_HOME: /x}}, {name: two, env: {A: b}}]}}]",
        "tenants (p-d).podTemplate.variants (one).env.HF_HOME: the chart sets this variable by"),
    "the name of a pod": (
        f"queues: {{required: false}}\ntenants: [{{{TENANT}, podTemplate: {{env: {{STRATA_POD: x}}}}}}]",
        "tenants (p-d).podTemplate.env.STRATA_POD: the chart sets this variable itself; leave it out"),
    "two templates of one name": (f"tenants: [{{{TENANT}, podTemplate: {{variants: [{{name: strata}}]}}}}]",
        "tenants (p-d).podTemplate.variants (strata): the name is taken"),
    "two queues of one name": (f"tenants: [{{{TENANT}, queues: [{_QUEUE}, {_QUEUE}]}}]\n{_MACHINES}",
        "tenants (p-d).queues (q): the name is taken"),
    "a volume named like a cache": (
        f"tenants: [{{{TENANT}, podTemplate: {{volumes: [{_VOLUME % ('triton-cache', '/x')}]}}}}]",
        "tenants (p-d).podTemplate.volumes (triton-cache): the name is taken"),
    "a volume where a cache is": (
        f"tenants: [{{{TENANT}, podTemplate: {{volumes: [{_VOLUME % ('v', '/var/cache/strata/triton')}]}}}}]",
        "tenants (p-d).podTemplate.volumes (/var/cache/strata/triton): the mountPath is taken"),
    "a volume in place of shared memory": (
        f"tenants: [{{{TENANT}, podTemplate: {{volumes: [{_VOLUME % ('v', '/dev/shm')}]}}}}]",
        f"tenants (p-d).podTemplate.volumes (v).mountPath: /dev/shm {_NO_VOLUME}"),
    "volumes in folders that are not the image's": (
        _tenant(podTemplate={"volumes": _volumes("/dev", "/dev/shm/x", "/proc", "/sys"),
                             "caches": {"triton": {"path": "/dev/shm/triton"}}}),
        *(f"tenants (p-d).podTemplate.volumes (v{number}).mountPath: {path} {_NO_VOLUME}"
          for number, path in enumerate(("/dev", "/dev/shm/x", "/proc", "/sys"))),
        f"tenants (p-d).podTemplate.caches.triton.path: /dev/shm/triton {_NO_VOLUME}"),
    "a volume where the image's packages are": (
        _tenant(podTemplate={"volumes": _volumes("/opt/strata")}),
        "tenants (p-d).podTemplate.volumes (v0).mountPath: /opt/strata holds the Python packages of the image, and a "
        "volume would hide them; mount it elsewhere"),
    "a volume of the chart's own pods and a claim of kernels in such places": (
        "tests: {volumes: [{name: v, claim: c, mountPath: /proc/x}]}\nkernels: {bake: {path: /sys/kernels}}",
        f"tests.volumes (v).mountPath: /proc/x {_NO_VOLUME}", f"kernels.bake.path: /sys/kernels {_NO_VOLUME}"),
    "quotas of what nobody asks for": (
        "queues: {flavors: [{name: f}], gpuResources: [gpus], unqueuedLimits: {cpuu: 16}, provisioning: "
        "[{name: nodes, className: c, managedResources: [gpu]}], clusterQueues: [{name: q, quotas: [{flavor: f, "
        "resources: {gpus: {nominal: 8}, pods: {nominal: 8}}}]}]}",
        f"queues.clusterQueues (q).quotas (f).resources.gpus: {_NO_RESOURCE}, pods,", "or a device with its domain",
        f"queues.gpuResources.gpus: {_NO_RESOURCE}", f"queues.unqueuedLimits.cpuu: {_NO_RESOURCE}",
        f"queues.provisioning (nodes).managedResources.gpu: {_NO_RESOURCE}"),
    "limits of what nobody asks for": (
        _tenant(limits={"max": {"cpuu": 64}, "default": {"gpus": 1}, "defaultRequest": {"pods": 1}},
                podTemplate={"variants": [{"name": "fast", "resources": {"rdma": 8}}]}),
        f"tenants (p-d).limits.max.cpuu: {_NO_RESOURCE}", f"tenants (p-d).limits.default.gpus: {_NO_RESOURCE}",
        f"tenants (p-d).limits.defaultRequest.pods: {_NO_RESOURCE}",
        f"tenants (p-d).podTemplate.variants (fast).resources.rdma: {_NO_RESOURCE}"),
    "resources of the chart's own pods that nobody has": (
        "tests: {resources: {mem: 1Gi}, allReduce: {gpuResource: gpu}}\nretention: {resources: {cpus: 1}}",
        f"tests.resources.mem: {_NO_RESOURCE}", f"tests.allReduce.gpuResource.gpu: {_NO_RESOURCE}",
        f"retention.resources.cpus: {_NO_RESOURCE}"),
    "ranges that are none": (
        _ranges("fd00:::/64", "12345::/64", "1::2::3/64", "1:2:3:4:5:6:7/112", "1:2:3:4:5:6:7:8::/112", ":/0"),
        *(f"tenants (p-d).network.others[{number}].cidr: {cidr} {_NO_RANGE}"
          for number, cidr in enumerate(("fd00:::/64", "12345::/64", "1::2::3/64", "1:2:3:4:5:6:7/112",
                                         "1:2:3:4:5:6:7:8::/112", ":/0")))),
    "addresses with the length of a range": (
        _ranges("10.0.0.1/8", "10.20.40.0/20", "2001:db8::1/64", "2001:db8:0:c000::/49"),
        "tenants (p-d).network.others[0].cidr: 10.0.0.1/8 has bits behind its length of 8; write 10.0.0.0/8 for the "
        "range, or 10.0.0.1/32 for the one address",
        "write 10.20.32.0/20 for the range, or 10.20.40.0/32",
        "write 2001:db8:0:0:0:0:0:0/64 for the range, or 2001:db8::1/128",
        "write 2001:db8:0:8000:0:0:0:0/49 for the range"),
    "tenants where components of the cluster are": (
        "queues: {required: false}\ntenants: [{project: cert, domains: [manager]}, "
        "{project: gpu, domains: [operator]}, "
        "{project: jobset, domains: [system]}, {project: ingress, domains: [nginx]}]",
        *(f"tenants ({name}): the namespace {name} belongs to the cluster"
          for name in ("cert-manager", "gpu-operator", "jobset-system", "ingress-nginx"))),
    "variables of the chart's own pods": (
        "tests: {env: {TRITON_CACHE_DIR: /x, HF_HOME: /x, STRATA_REMOVAL: x, FLYTE_CREDENTIALS_CLIENT_ID: x}}\n"
        "queues: {timeout: {secret: s}}",
        "tests.env.TRITON_CACHE_DIR: only runs have this cache; set tenantDefaults.podTemplate.caches.triton.path",
        "tests.env.HF_HOME: only runs have this cache; set tenantDefaults.podTemplate.caches.huggingFace.path",
        "tests.env.STRATA_REMOVAL: the chart sets this variable itself; leave it out",
        "tests.env.FLYTE_CREDENTIALS_CLIENT_ID: the chart sets this variable by queues.timeout.secret"),
    "labels of the chart's objects": (
        _tenant(labels={"app.kubernetes.io/managed-by": "me"})
        + "observability: {labels: {helm.sh/chart: x}, dashboards: {labels: {app.kubernetes.io/name: x}}}",
        f"tenants (p-d).labels.app.kubernetes.io/managed-by: {_THE_CHARTS}",
        f"observability.labels.helm.sh/chart: {_THE_CHARTS}",
        f"observability.dashboards.labels.app.kubernetes.io/name: {_THE_CHARTS}"),
    "two volumes of one name": (
        f"tenants: [{{{TENANT}, podTemplate: {{volumes: [{_VOLUME % ('v', '/a')}, {_VOLUME % ('v', '/b')}]}}}}]",
        "tenants (p-d).podTemplate.volumes (v): the name is taken"),
    "two flavors of one name": ("queues: {flavors: [{name: f}, {name: f}]}", "queues.flavors (f): the name is taken"),
    "two cluster queues of one name": (f"queues: {{flavors: [{{name: f}}], clusterQueues: [{_SHARE}, {_SHARE}]}}",
        "queues.clusterQueues (q): the name is taken"),
    "two priorities of one name": ("queues: {priorities: [{name: p, value: 1}, {name: p, value: 2}]}",
        "queues.priorities (p): the name is taken"),
    "a flavor twice in a queue": ("queues: {flavors: [{name: f}], clusterQueues: [{name: q, quotas: ["
        "{flavor: f, resources: {cpu: {nominal: 1}}}, {flavor: f, resources: {cpu: {nominal: 2}}}]}]}",
        "queues.clusterQueues (q).quotas (f): the flavor is taken"),
    "a destination that is nowhere": (f"tenants: [{{{TENANT}, network: {{others: [{{ports: [{{port: 1}}]}}]}}}}]",
        "tenants (p-d).network.others[0]: give cidr for addresses or namespace"),
    "a destination in two places": (
        f"tenants: [{{{TENANT}, network: {{objectStore: [{{cidr: 10.0.0.0/8, namespace: minio}}]}}}}]",
        "tenants (p-d).network.objectStore[0]: give cidr"),
    "labels of addresses": (
        f"tenants: [{{{TENANT}, network: {{objectStore: [{{cidr: 10.0.0.0/8, podLabels: {{a: b}}}}]}}}}]",
        "tenants (p-d).network.objectStore[0].podLabels: addresses have no labels"),
    "no room for the tasks": (f"tenants: [{{{TENANT}, limits: {{max: {{cpu: 64, memory: 24Gi}}}}}}]",
        "tenants (p-d).limits.max.memory: 24Gi is less than 32Gi, which Strata's tasks may use; raise it"),
    "no room for the default": (
        f"tenants: [{{{TENANT}, limits: {{default: {{cpu: 16}}, max: {{cpu: 15500m, memory: 64Gi}}}}}}]",
        "tenants (p-d).limits.max.cpu: 15500m is less than 16, which limits.default may use; raise it, or lower that"),
    "no room for a default of another kind": (
        f"tenants: [{{{TENANT}, limits: {{defaultRequest: {{example/disk: 2G}}, max: {{example/disk: 1Gi}}}}}}]",
        "tenants (p-d).limits.max.example/disk: 1Gi is less than 2G, which limits.defaultRequest may use"),
    "no room to bake": (f"tenants: [{{{TENANT}, limits: {{max: {{cpu: 16}}}}}}]\n"
        "kernels: {bake: {claim: c, models: [qwen3-4b], resources: {cpu: 32}}}",
        "tenants (p-d).limits.max.cpu: 16 is less than 32, which kernels.bake.resources may use"),
    "a toleration of a value and of any": (
        f"tenants: [{{{TENANT}, podTemplate: {{tolerations: [{_TWO_WAYS}]}}}}]",
        'tenants (p-d).podTemplate.tolerations (k).operator: "Exists" is for any value, and value is "v"'),
    "a variant that tolerates it": (
        f"tenants: [{{{TENANT}, podTemplate: {{variants: [{{name: fast, tolerations: [{_TWO_WAYS}]}}]}}}}]",
        "tenants (p-d).podTemplate.variants (fast).tolerations (k).operator"),
    "a flavor that tolerates it": (f"queues: {{flavors: [{{name: f, tolerations: [{_TWO_WAYS}]}}]}}",
        "queues.flavors (f).tolerations (k).operator"),
    "a puller that tolerates it": (f"kernels: {{prepull: {{tolerations: [{_TWO_WAYS}]}}}}",
        "kernels.prepull.tolerations (k).operator"),
    "kernels that nothing keeps": ("kernels: {bake: {models: [qwen3-4b]}}",
        "kernels.bake.claim: empty, and kernels.bake.models has models to bake"),
    "a store that anybody may fill": ("kernels: {store: {url: 's3://bucket/kernels'}}",
        "kernels.store.secret: empty, but pods execute the archives of kernels.store.url"),
    "a key to no store": ("kernels: {store: {secret: keys}}",
        "kernels.store.url: empty, but kernels.store.secret is set"),
    "tests without an image": (f"tenants: [{{{TENANT}}}]\nimage: {{repository: ''}}", "image.repository is empty"),
}  # fmt: skip
