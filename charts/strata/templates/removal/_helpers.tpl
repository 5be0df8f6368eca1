{{/* What `helm uninstall` empties first, as JSON. */}}
{{- define "strata.removal.release" -}}
{{- $local := list -}}
{{- range $tenant := include "strata.tenants" . | fromJsonArray -}}
{{- range .queues }}{{ $local = append $local (list $tenant.namespace .name) }}{{ end -}}
{{- end -}}
{{- $names := dict -}}
{{- range $kind := list "clusterQueues" "flavors" "topologies" "cohorts" "provisioning" "multiKueue" -}}
{{- $found := list -}}
{{- range index $.Values.queues $kind }}{{ $found = append $found .name }}{{ end -}}
{{- $_ := set $names $kind $found -}}
{{- end -}}
{{- dict
  "name" .Release.Name
  "namespace" .Release.Namespace
  "kueue_namespace" .Values.queues.kueue.namespace
  "local_queues" $local
  "cluster_queues" $names.clusterQueues
  "flavors" $names.flavors
  "topologies" $names.topologies
  "cohorts" $names.cohorts
  "admission_checks" (concat $names.provisioning $names.multiKueue | default list)
  "seconds" .Values.removal.seconds | toJson -}}
{{- end }}

{{/* Hooks before `helm uninstall`; takes the weight. A Job that failed stays, for its log. */}}
{{- define "strata.removal.hook" -}}
helm.sh/hook: pre-delete
helm.sh/hook-weight: {{ .weight | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded{{ if lt (int .weight) 0 }},hook-failed{{ end }}
{{- end }}

{{- define "strata.removal.enabled" -}}
{{- if and .Values.removal.enabled .Values.queues.enabled .Values.queues.clusterQueues }}true{{ end }}
{{- end }}
