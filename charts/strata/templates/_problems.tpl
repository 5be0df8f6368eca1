{{/*
What the schema cannot say: values that are wrong together, or whose error has to name the way out. A line for each problem.
*/}}
{{- define "strata.problems" -}}
{{- include "strata.problems.tenants" . }}
{{- include "strata.problems.queues" . }}
{{- include "strata.problems.kueue" . }}
{{- include "strata.problems.release" . }}
{{- include "strata.problems.tolerations" (list "kernels.prepull" .Values.kernels.prepull.tolerations) }}
{{- with .Values.retention }}
{{- if and (or .checkpoints .runs) (not .folders) }}
retention.folders: empty, but retention.checkpoints or retention.runs asks to remove old ones; name the mount paths of the tenants' claims that runs are in, or leave the ages out
{{- end }}
{{- end }}
{{- with .Values.tests.allReduce }}
{{- if eq 1 (int .nodes) }}
tests.allReduce.nodes: 1, but the test measures between nodes; set 2 or more, or 0 to run none
{{- else if and .nodes (not (include "strata.tests.allReduce" $)) }}
tests.allReduce.nodes: {{ .nodes }}, but no tenant has a queue for the test's job; give one a queue, or set 0
{{- end }}
{{- end }}
{{- include "strata.problems.tolerations" (list "nodeHealth" .Values.nodeHealth.tolerations) }}
{{- with .Values.kernels.bake }}
{{- if and .models (not .claim) }}
kernels.bake.claim: empty, and kernels.bake.models has models to bake; name a claim of the tenants that keeps them, or leave models out
{{- end }}
{{- end }}
{{- with .Values.kernels.store }}
{{- if and .url (not .secret) }}
kernels.store.secret: empty, but pods execute the archives of kernels.store.url; name a secret of the tenants that has the key KERNEL_STORE_KEY to sign them with, or leave url out
{{- else if and .secret (not .url) }}
kernels.store.url: empty, but kernels.store.secret is set; set kernels.store.url, or leave kernels.store.secret out
{{- end }}
{{- end }}
{{- end }}

{{/* Of a tenant's names: namespaces that are not its own, groups of everybody, labels and variables that are the chart's. */}}
{{- define "strata.problems.reserved" -}}
{{- $where := .where }}
{{- $others := list "default" .root.Release.Namespace .root.Values.queues.kueue.namespace .root.Values.flyte.namespace .root.Values.observability.namespace }}
{{- with .tenant }}
{{- $components := list "argo-rollouts" "calico-apiserver" "calico-system" "cattle-system" "cert-manager" "cilium-secrets" "cluster-autoscaler" "external-dns" "external-secrets" "flux-system" "gatekeeper-system" "gmp-system" "gpu-operator" "ingress-nginx" "istio-system" "jobset-system" "kueue-system" "kubeflow-system" "local-path-storage" "longhorn-system" "lws-system" "metallb-system" "minio-operator" "network-operator" "node-feature-discovery" "nvidia-gpu-operator" "nvidia-network-operator" "rook-ceph" "spark-operator" "tigera-operator" "training-operator" }}
{{- if or (hasPrefix "kube-" .namespace) (has .namespace (concat $others $components)) }}
{{ $where }}: the namespace {{ .namespace }} belongs to the cluster, and tenants' policies and rights would hold for what runs there; choose another project or domain
{{- end }}
{{- range $list := list "members" "submitters" }}
{{- range get $.tenant $list }}
{{- $account := printf "system:serviceaccount%s:" (ternary "s" "" (eq .kind "Group")) }}
{{- if and (hasPrefix "system:" .name) (not (hasPrefix $account .name)) }}
{{ $where }}.{{ $list }} ({{ .name }}): Kubernetes gives this name to accounts that are not of one team, such as all that are logged in; name a {{ lower .kind }} of your own
{{- end }}
{{- end }}
{{- end }}
{{- range $label, $_ := .labels }}
{{- if or (hasPrefix "pod-security.kubernetes.io/" $label) (hasPrefix "strata/" $label) (eq "kubernetes.io/metadata.name" $label) }}
{{ $where }}.labels.{{ $label }}: the chart sets this label itself; set podSecurity, project or domain, or leave it out
{{- end }}
{{- end }}
{{- include "strata.problems.labels" (list (printf "%s.labels" $where) .labels) }}
{{- $set := dict "TRITON_CACHE_DIR" "podTemplate.caches.triton.path" "HF_HOME" "podTemplate.caches.huggingFace.path" "STRATA_BAKED_KERNELS" "kernels.bake.models" "STRATA_QUEUES" "queues.clusterQueues" "STRATA_KERNEL_STORE" "kernels.store.url" "KERNEL_STORE_KEY" "kernels.store.secret" "STRATA_CHECK" "tests" }}
{{- $environments := dict "podTemplate.env" .podTemplate.env }}
{{- range $variant := .podTemplate.variants }}
{{- with .env }}{{ $_ := set $environments (printf "podTemplate.variants (%s).env" $variant.name) . }}{{ end }}
{{- end }}
{{- range $place, $variables := $environments }}
{{- range $variable, $_ := $variables }}
{{- if hasKey $set $variable }}
{{ $where }}.{{ $place }}.{{ $variable }}: the chart sets this variable by {{ get $set $variable }}; set that, or leave it out
{{- else if eq "STRATA_POD" $variable }}
{{ $where }}.{{ $place }}.{{ $variable }}: the chart sets this variable itself; leave it out
{{- end }}
{{- end }}
{{- end }}
{{- if and $.root.Values.queues.required (not .queues) }}
{{ $where }}.queues: empty, but queues.required rejects every run that names no queue; give the tenant one, or set queues.required to false
{{- end }}
{{- end }}
{{- end }}

{{- define "strata.problems.tenants" -}}
{{- $seen := dict }}
{{- $clusterQueues := dict }}
{{- range .Values.queues.clusterQueues }}{{ $_ := set $clusterQueues .name true }}{{ end }}
{{- range $tenant := include "strata.tenants" . | fromJsonArray }}
{{- $where := printf "tenants (%s)" $tenant.namespace }}
{{- if gt (len $tenant.namespace) 63 }}
{{ $where }}: the namespace's name has {{ len $tenant.namespace }} letters, but only 63 are allowed; shorten the project or the domain
{{- end }}
{{- if hasKey $seen $tenant.namespace }}
{{ $where }}: the namespace appears twice; another project and domain join to the same name
{{- end }}
{{- $_ := set $seen $tenant.namespace true }}
{{- include "strata.problems.reserved" (dict "root" $ "tenant" $tenant "where" $where) }}
{{- range $queue := $tenant.queues }}
{{- if and $.Values.queues.enabled (not (hasKey $clusterQueues $queue.clusterQueue)) }}
{{ $where }}.queues ({{ $queue.name }}).clusterQueue: there is no queues.clusterQueues entry {{ quote $queue.clusterQueue }}; there are: {{ keys $clusterQueues | sortAlpha | join ", " | default "none" }}
{{- end }}
{{- end }}
{{- if ne $tenant.podTemplate.name $.Values.tenantDefaults.podTemplate.name }}
{{ $where }}.podTemplate.name: Flyte starts the pods of all tenants from one name, {{ quote $.Values.tenantDefaults.podTemplate.name }}; change tenantDefaults.podTemplate.name, or add a template to variants
{{- end }}
{{- include "strata.problems.taken" (list (printf "%s.queues" $where) "name" $tenant.queues) }}
{{- $templates := prepend $tenant.podTemplate.variants (dict "name" $tenant.podTemplate.name) }}
{{- include "strata.problems.taken" (list (printf "%s.podTemplate.variants" $where) "name" $templates) }}
{{- $volumes := printf "%s.podTemplate.volumes" $where }}
{{- with (include "strata.podTemplate" (dict "root" $ "tenant" $tenant) | fromYaml).spec }}
{{- include "strata.problems.taken" (list $volumes "name" .volumes) }}
{{- include "strata.problems.taken" (list $volumes "mountPath" (first .containers).volumeMounts) }}
{{- end }}
{{- include "strata.problems.mounts" (list $volumes $tenant.podTemplate.volumes) }}
{{- range $cache, $settings := $tenant.podTemplate.caches }}
{{- include "strata.problems.mountPath" (list (printf "%s.podTemplate.caches.%s.path" $where $cache) $settings.path) }}
{{- end }}
{{- range $variant := $tenant.podTemplate.variants }}
{{- include "strata.problems.resources" (list (printf "%s.podTemplate.variants (%s).resources" $where $variant.name) $variant.resources) }}
{{- range $name, $_ := $variant.resources }}
{{- if and (hasPrefix "hugepages-" $name) (not (or (hasKey $variant.resources "cpu") (hasKey $variant.resources "memory"))) }}
{{ $where }}.podTemplate.variants ({{ $variant.name }}).resources.{{ $name }}: Kubernetes takes huge pages beside cpu or memory alone; add memory, in place of which a run's own counts
{{- end }}
{{- end }}
{{- include "strata.problems.tolerations" (list (printf "%s.podTemplate.variants (%s)" $where $variant.name) $variant.tolerations) }}
{{- end }}
{{- include "strata.problems.tolerations" (list (printf "%s.podTemplate" $where) $tenant.podTemplate.tolerations) }}
{{- range $kind, $resources := $tenant.limits }}
{{- include "strata.problems.resources" (list (printf "%s.limits.%s" $where $kind) $resources) }}
{{- end }}
{{- include "strata.problems.limits" (dict "root" $ "tenant" $tenant "where" (printf "%s.limits" $where)) }}
{{- range $list := list "dns" "flyte" "objectStore" "others" }}
{{- range $index, $destination := index $tenant.network $list }}
{{- if eq (empty $destination.cidr) (empty $destination.namespace) }}
{{ $where }}.network.{{ $list }}[{{ $index }}]: give cidr for addresses or namespace for pods of this cluster, one of the two
{{- else if and $destination.cidr $destination.podLabels }}
{{ $where }}.network.{{ $list }}[{{ $index }}].podLabels: addresses have no labels; give namespace in place of cidr, or leave podLabels out
{{- end }}
{{- with $destination.cidr }}
{{- include "strata.problems.cidr" (list (printf "%s.network.%s[%d].cidr" $where $list $index) .) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "strata.problems.queues" -}}
{{- include "strata.problems.resources" (list "queues.unqueuedLimits" .Values.queues.unqueuedLimits) }}
{{- range $name, $most := .Values.queues.unqueuedLimits }}
{{- $needed := get ($.Files.Get "tasks.json" | fromJson) $name }}
{{- if and $needed (lt (include "strata.number" $most | float64) (include "strata.number" $needed | float64)) }}
queues.unqueuedLimits.{{ $name }}: {{ $most }} is less than {{ $needed }}, which Strata's tasks may use; raise it
{{- end }}
{{- end }}
{{- range .Values.queues.gpuResources }}
{{- if not (hasSuffix "*" .) }}{{ include "strata.problems.resources" (list "queues.gpuResources" (dict . 0)) }}{{ end }}
{{- end }}
{{- range $check := .Values.queues.provisioning }}
{{- range .managedResources }}
{{- include "strata.problems.resources" (list (printf "queues.provisioning (%s).managedResources" $check.name) (dict . 0)) }}
{{- end }}
{{- end }}
{{- $submitters := include "strata.submitters" . | fromJsonArray }}
{{- with .Values.queues.timeout }}
{{- if and .after (not .flyte) (not $submitters) }}
queues.timeout.flyte: empty, but queues.timeout.after asks to end runs; name Flyte's gRPC service, give tenants submitters of runs without Flyte, or leave after out
{{- end }}
{{- end }}
{{- range $list := list "topologies" "flavors" "clusterQueues" "priorities" "cohorts" }}
{{- include "strata.problems.taken" (list (printf "queues.%s" $list) "name" (index $.Values.queues $list)) }}
{{- end }}
{{- $checks := concat .Values.queues.provisioning .Values.queues.multiKueue }}
{{- include "strata.problems.taken" (list "queues.provisioning and queues.multiKueue" "name" $checks) }}
{{- $clusters := list }}
{{- range .Values.queues.multiKueue }}{{ $clusters = concat $clusters .clusters }}{{ end }}
{{- include "strata.problems.taken" (list "queues.multiKueue.clusters" "name" $clusters) }}
{{- $known := list }}
{{- range $checks }}{{ $known = append $known .name }}{{ end }}
{{- range .Values.queues.cohorts }}
{{- if not (include "strata.rootCohort" (dict "root" $ "cohort" .name "path" list)) }}
queues.cohorts ({{ .name }}).parent: {{ quote .parent }} is below this cohort itself, and Kueue admits nothing in a cycle; leave one parent out
{{- end }}
{{- end }}
{{- $flavors := dict }}
{{- range .Values.queues.flavors }}{{ $_ := set $flavors .name true }}{{ end }}
{{- $topologies := dict }}
{{- range .Values.queues.topologies }}{{ $_ := set $topologies .name true }}{{ end }}
{{- range .Values.queues.flavors }}
{{- include "strata.problems.tolerations" (list (printf "queues.flavors (%s)" .name) .tolerations) }}
{{- if and .topology (not (hasKey $topologies .topology)) }}
queues.flavors ({{ .name }}).topology: there is no queues.topologies entry {{ quote .topology }}; there are: {{ keys $topologies | sortAlpha | join ", " | default "none" }}
{{- end }}
{{- if and .topology (not .nodeLabels) }}
queues.flavors ({{ .name }}).nodeLabels: a flavor with a topology has to say which nodes it is of
{{- end }}
{{- end }}
{{- range $queue := .Values.queues.clusterQueues }}
{{- $where := printf "queues.clusterQueues (%s)" $queue.name }}
{{- include "strata.problems.taken" (list (printf "%s.quotas" $where) "flavor" $queue.quotas) }}
{{- $covered := keys (first $queue.quotas).resources | sortAlpha | join ", " }}
{{- range $queue.quotas }}
{{- if not (hasKey $flavors .flavor) }}
{{ $where }}.quotas: there is no queues.flavors entry {{ quote .flavor }}; there are: {{ keys $flavors | sortAlpha | join ", " | default "none" }}
{{- end }}
{{- if ne $covered (keys .resources | sortAlpha | join ", ") }}
{{ $where }}.quotas ({{ .flavor }}).resources: all flavors of a queue name the same resources, and the first has {{ $covered }}
{{- end }}
{{- /* Kueue counts the pods themselves, too. */}}
{{- include "strata.problems.resources" (list (printf "%s.quotas (%s).resources" $where .flavor) .resources "pods") }}
{{- range $name, $quota := .resources }}
{{- range $limit := list "borrowingLimit" "lendingLimit" }}
{{- if and (not $queue.cohort) (ne (toString (get $quota $limit)) "") }}
{{ $where }}.quotas.resources.{{ $name }}.{{ $limit }}: a queue without a cohort shares nothing; set cohort, or leave {{ $limit }} out
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- $own := list }}
{{- range $queue.quotas }}{{ $own = append $own .flavor }}{{ end }}
{{- range $check := $queue.admissionChecks }}
{{- if not (has .name $known) }}
{{ $where }}.admissionChecks: there is no entry {{ quote .name }} in queues.provisioning or queues.multiKueue; there are: {{ $known | sortAlpha | join ", " | default "none" }}
{{- end }}
{{- range .flavors }}
{{- if not (has . $own) }}
{{ $where }}.admissionChecks ({{ $check.name }}).flavors: the queue has no quota in {{ quote . }}, only in: {{ join ", " $own }}
{{- end }}
{{- end }}
{{- end }}
{{- with $queue.preemption }}
{{- if and (eq (.reclaimWithinCohort | default "Any") "Never") (ne (.borrowWithinCohort | default "Never") "Never") }}
{{ $where }}.preemption.borrowWithinCohort: {{ quote .borrowWithinCohort }} needs preemption.reclaimWithinCohort other than "Never"
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Of what the chart itself runs and creates in the release's namespace. */}}
{{- define "strata.problems.release" -}}
{{- $values := .Values }}
{{- range $where, $resources := dict
  "kernels.bake" $values.kernels.bake "kernels.prepull" $values.kernels.prepull "nodeHealth" $values.nodeHealth
  "tests" $values.tests "tests.job" $values.tests.job "tests.allReduce" $values.tests.allReduce
  "retention" $values.retention "removal" $values.removal }}
{{- include "strata.problems.resources" (list (printf "%s.resources" $where) $resources.resources) }}
{{- end }}
{{- include "strata.problems.resources" (list "tests.allReduce.gpuResource" (dict $values.tests.allReduce.gpuResource 0)) }}
{{- include "strata.problems.mounts" (list "tests.volumes" $values.tests.volumes) }}
{{- include "strata.problems.mountPath" (list "kernels.bake.path" $values.kernels.bake.path) }}
{{- include "strata.problems.labels" (list "observability.labels" $values.observability.labels) }}
{{- include "strata.problems.labels" (list "observability.dashboards.labels" $values.observability.dashboards.labels) }}
{{- $caches := dict "TRITON_CACHE_DIR" "triton" "HF_HOME" "huggingFace" }}
{{- $own := list "STRATA_CHECK" "STRATA_NODE_HEALTH" "STRATA_QUEUE_TIMEOUT" "STRATA_REMOVAL" "STRATA_RETENTION" }}
{{- range $variable, $_ := $values.tests.env }}
{{- if hasKey $caches $variable }}
tests.env.{{ $variable }}: only runs have this cache; set tenantDefaults.podTemplate.caches.{{ get $caches $variable }}.path, or leave it out
{{- else if has $variable $own }}
tests.env.{{ $variable }}: the chart sets this variable itself; leave it out
{{- else if and $values.queues.timeout.secret (has $variable (list "FLYTE_CREDENTIALS_AUTH_MODE" "FLYTE_CREDENTIALS_CLIENT_ID" "FLYTE_CREDENTIALS_CLIENT_SECRET")) }}
tests.env.{{ $variable }}: the chart sets this variable by queues.timeout.secret; set that, or leave it out
{{- end }}
{{- end }}
{{- end }}

{{/* Of names of resources, which Kubernetes or Kueue would take and never count; takes where they are, a mapping, and more names. */}}
{{- define "strata.problems.resources" -}}
{{- $more := slice . 2 }}
{{- range $name, $_ := index . 1 }}
{{- if not (or (has $name $more) (regexMatch "^(cpu|memory|ephemeral-storage|hugepages-[0-9]+[KMG]i|[a-z0-9]([a-z0-9.-]*[a-z0-9])?/[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?)$" $name)) }}
{{ first $ }}.{{ $name }}: Kubernetes has no such resource; write cpu, memory, ephemeral-storage, {{ range $more }}{{ . }}, {{ end }}hugepages-2Mi and the like, or a device with its domain, such as nvidia.com/gpu
{{- end }}
{{- end }}
{{- end }}

{{/* Of labels that each object of the chart has; takes where they are, and the labels. */}}
{{- define "strata.problems.labels" -}}
{{- range $label, $_ := last . }}
{{- if or (hasPrefix "app.kubernetes.io/" $label) (hasPrefix "helm.sh/" $label) }}
{{ first $ }}.{{ $label }}: labels of app.kubernetes.io and helm.sh are the chart's own; take one with a domain of yours, such as example.com/team, or without a domain
{{- end }}
{{- end }}
{{- end }}

{{/* Of volumes; takes where they are, and the list. */}}
{{- define "strata.problems.mounts" -}}
{{- range last . }}
{{- include "strata.problems.mountPath" (list (printf "%s (%s).mountPath" (first $) .name) .mountPath) }}
{{- end }}
{{- end }}

{{/*
Of a mount path that hides what a container cannot start without; takes where it is, and the path. Flyte refuses a run with
shared memory where something is mounted at /dev/shm.
*/}}
{{- define "strata.problems.mountPath" -}}
{{- $path := last . }}
{{- if regexMatch "^/(dev|proc|sys)(/|$)" $path }}
{{ first . }}: {{ $path }} cannot be a volume: the container runtime fills /dev, /proc and /sys, and /dev/shm is a run's shared memory; mount it elsewhere, such as at /data
{{- else if eq $path "/opt/strata" }}
{{ first . }}: {{ $path }} holds the Python packages of the image, and a volume would hide them; mount it elsewhere, such as at /data
{{- end }}
{{- end }}

{{/* Of a range of addresses, such as 10.0.0.0/8 or fd00::/64; takes where it is, and the range. */}}
{{- define "strata.problems.cidr" -}}
{{- $cidr := last . }}
{{- $address := splitList "/" $cidr | first }}
{{- $length := splitList "/" $cidr | last | int }}
{{- $bits := 8 }}
{{- $groups := splitList "." $address }}
{{- $valid := true }}
{{- if contains ":" $address }}
{{- $bits = 16 }}
{{- $groups = list }}
{{- $halves := splitList "::" $address }}
{{- $tail := list }}
{{- with first $halves }}{{ $groups = splitList ":" . }}{{ end }}
{{- if gt (len $halves) 1 }}
{{- with last $halves }}{{ $tail = splitList ":" . }}{{ end }}
{{- end }}
{{- $zeros := sub 8 (add (len $groups) (len $tail)) | int }}
{{- $valid = ternary (eq $zeros 0) (and (eq (len $halves) 2) (ge $zeros 1)) (eq (len $halves) 1) }}
{{- range concat $groups $tail }}{{ $valid = and $valid (regexMatch "^[0-9a-fA-F]{1,4}$" .) }}{{ end }}
{{- if $valid }}
{{- range until $zeros }}{{ $groups = append $groups "0" }}{{ end }}
{{- $groups = concat $groups $tail }}
{{- end }}
{{- end }}
{{- if not $valid }}
{{ first . }}: {{ $cidr }} is not a range of addresses; write one such as 10.20.0.0/16 or fd00::/64
{{- else }}
{{- $network := list }}
{{- $same := true }}
{{- range $i, $group := $groups }}
{{- $value := ternary (printf "0x%s" $group) $group (eq $bits 16) | int64 }}
{{- $block := 1 }}
{{- range until (sub $bits (max 0 (min $bits (sub $length (mul $i $bits)))) | int) }}{{ $block = mul 2 $block }}{{ end }}
{{- $rest := mod $value $block }}
{{- if $rest }}{{ $same = false }}{{ end }}
{{- $network = append $network (printf (ternary "%x" "%d" (eq $bits 16)) (sub $value $rest)) }}
{{- end }}
{{- if not $same }}
{{ first . }}: {{ $cidr }} has bits behind its length of {{ $length }}; write {{ join (ternary ":" "." (eq $bits 16)) $network }}/{{ $length }} for the range, or {{ $address }}/{{ mul $bits (len $groups) }} for the one address
{{- end }}
{{- end }}
{{- end }}

{{/* Of entries that have the same name, or whatever tells them apart; takes where they are, that key, and the list. */}}
{{- define "strata.problems.taken" -}}
{{- $key := index . 1 }}
{{- $seen := dict }}
{{- range last . }}
{{- $name := get . $key }}
{{- if hasKey $seen $name }}
{{ first $ }} ({{ $name }}): the {{ $key }} is taken; choose another
{{- end }}
{{- $_ := set $seen $name true }}
{{- end }}
{{- end }}

{{/* Of tolerations; takes where they are, and the list. */}}
{{- define "strata.problems.tolerations" -}}
{{- $where := first . }}
{{- range last . }}
{{- if and .value (eq (.operator | default "") "Exists") }}
{{ $where }}.tolerations ({{ .key }}).operator: "Exists" is for any value, and value is {{ quote .value }}; leave one of the two out
{{- end }}
{{- end }}
{{- end }}

{{/* Kubernetes refuses what asks for more than limits.max; takes the release's context, the tenant, and where it is. */}}
{{- define "strata.problems.limits" -}}
{{- $limits := .tenant.limits }}
{{- $asked := dict "limits.default" $limits.default "limits.defaultRequest" $limits.defaultRequest
  "Strata's tasks" (.root.Files.Get "tasks.json" | fromJson) }}
{{- if .root.Values.kernels.bake.models }}{{ $_ := set $asked "kernels.bake.resources" .root.Values.kernels.bake.resources }}{{ end }}
{{- range $who, $resources := $asked }}
{{- range $name, $quantity := $resources }}
{{- if hasKey $limits.max $name }}
{{- $max := get $limits.max $name }}
{{- if lt (include "strata.number" $max | float64) (include "strata.number" $quantity | float64) }}
{{ $.where }}.max.{{ $name }}: {{ $max }} is less than {{ $quantity }}, which {{ $who }} may use; raise it{{ if ne $who "Strata's tasks" }}, or lower that{{ end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* Needs the cluster: nothing is found under `helm template`, and nothing is said then. */}}
{{- define "strata.problems.kueue" -}}
{{- with .Values.queues.kueue }}
{{- if .check }}
{{- $frameworks := list }}
{{- $config := lookup "v1" "ConfigMap" .namespace .configMap }}
{{- $fair := false }}
{{- range $config.data }}
{{- if hasKey (fromYaml .) "fairSharing" }}{{ $fair = true }}{{ end }}
{{- $frameworks = concat $frameworks (dig "integrations" "frameworks" list (fromYaml .)) }}
{{- end }}
{{- if and $config (not (has "kubeflow.org/pytorchjob" $frameworks)) }}
queues.kueue: the ConfigMap {{ .namespace }}/{{ .configMap }} does not list the integration kubeflow.org/pytorchjob, so training jobs would not queue; add it to integrations.frameworks and restart Kueue, or set queues.kueue.check to false
{{- end }}
{{- $weighted := list }}
{{- range concat $.Values.queues.clusterQueues $.Values.queues.cohorts }}
{{- if ne (toString (get . "weight")) "" }}{{ $weighted = append $weighted .name }}{{ end }}
{{- end }}
{{- if and $config $weighted (not $fair) }}
queues.kueue: {{ first $weighted }} has a weight, and the ConfigMap {{ .namespace }}/{{ .configMap }} has no fairSharing, without which Kueue ignores it; add fairSharing and restart Kueue, leave weight out, or set queues.kueue.check to false
{{- end }}
{{- if and $config (include "strata.submitters" $ | fromJsonArray) (not (has "jobset.x-k8s.io/jobset" $frameworks)) }}
queues.kueue: the ConfigMap {{ .namespace }}/{{ .configMap }} does not list the integration jobset.x-k8s.io/jobset, so what submitters start would not queue; add it to integrations.frameworks and restart Kueue, or set queues.kueue.check to false
{{- end }}
{{- end }}
{{- end }}
{{- end }}
