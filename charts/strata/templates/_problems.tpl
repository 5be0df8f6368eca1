{{/*
What the schema cannot say: values that are right one by one and wrong together. A line for each problem.
*/}}
{{- define "strata.problems" -}}
{{- include "strata.problems.tenants" . }}
{{- include "strata.problems.queues" . }}
{{- include "strata.problems.kueue" . }}
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
{{- $others := list "default" .root.Release.Namespace .root.Values.queues.kueue.namespace .root.Values.tests.flyte.namespace .root.Values.observability.namespace }}
{{- with .tenant }}
{{- if or (hasPrefix "kube-" .namespace) (has .namespace $others) }}
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
{{- $set := dict "TRITON_CACHE_DIR" "podTemplate.caches.triton.path" "HF_HOME" "podTemplate.caches.huggingFace.path" "STRATA_BAKED_KERNELS" "kernels.bake.models" "STRATA_QUEUES" "queues.clusterQueues" "STRATA_KERNEL_STORE" "kernels.store.url" "KERNEL_STORE_KEY" "kernels.store.secret" }}
{{- $environments := dict "podTemplate.env" .podTemplate.env }}
{{- range $variant := .podTemplate.variants }}
{{- with .env }}{{ $_ := set $environments (printf "podTemplate.variants (%s).env" $variant.name) . }}{{ end }}
{{- end }}
{{- range $place, $variables := $environments }}
{{- range $variable, $_ := $variables }}
{{- if hasKey $set $variable }}
{{ $where }}.{{ $place }}.{{ $variable }}: the chart sets this variable by {{ get $set $variable }}; set that, or leave it out
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
{{- /* Flyte mounts shared memory for a run that asks for some, and refuses the run where something is there. */}}
{{- $mounts := prepend (first .containers).volumeMounts (dict "mountPath" "/dev/shm") }}
{{- include "strata.problems.taken" (list $volumes "mountPath" $mounts) }}
{{- end }}
{{- range $variant := $tenant.podTemplate.variants }}
{{- range $name, $_ := $variant.resources }}
{{- if and (hasPrefix "hugepages-" $name) (not (or (hasKey $variant.resources "cpu") (hasKey $variant.resources "memory"))) }}
{{ $where }}.podTemplate.variants ({{ $variant.name }}).resources.{{ $name }}: Kubernetes takes huge pages beside cpu or memory alone; add memory, in place of which a run's own counts
{{- end }}
{{- end }}
{{- include "strata.problems.tolerations" (list (printf "%s.podTemplate.variants (%s)" $where $variant.name) $variant.tolerations) }}
{{- end }}
{{- include "strata.problems.tolerations" (list (printf "%s.podTemplate" $where) $tenant.podTemplate.tolerations) }}
{{- include "strata.problems.limits" (dict "root" $ "tenant" $tenant "where" (printf "%s.limits" $where)) }}
{{- range $list := list "dns" "flyte" "objectStore" "others" }}
{{- range $index, $destination := index $tenant.network $list }}
{{- if eq (empty $destination.cidr) (empty $destination.namespace) }}
{{ $where }}.network.{{ $list }}[{{ $index }}]: give cidr for addresses or namespace for pods of this cluster, one of the two
{{- else if and $destination.cidr $destination.podLabels }}
{{ $where }}.network.{{ $list }}[{{ $index }}].podLabels: addresses have no labels; give namespace in place of cidr, or leave podLabels out
{{- end }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{- define "strata.problems.queues" -}}
{{- range $name, $most := .Values.queues.unqueuedLimits }}
{{- $needed := get ($.Files.Get "tasks.json" | fromJson) $name }}
{{- if and $needed (lt (include "strata.number" $most | float64) (include "strata.number" $needed | float64)) }}
queues.unqueuedLimits.{{ $name }}: {{ $most }} is less than {{ $needed }}, which Strata's tasks may use; raise it
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
