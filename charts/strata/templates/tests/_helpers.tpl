{{/* What the check in the release's namespace is to find, as JSON. */}}
{{- define "strata.tests.cluster" -}}
{{- $tenants := list -}}
{{- range include "strata.tenants" . | fromJsonArray -}}
{{- $templates := list .podTemplate.name -}}
{{- range .podTemplate.variants }}{{ $templates = append $templates .name }}{{ end -}}
{{- $queues := dict -}}
{{- range .queues }}{{ $_ := set $queues .name .clusterQueue }}{{ end -}}
{{- $objects := dict "PodTemplate" $templates "ServiceAccount" (list .serviceAccount.name) "LimitRange" (list "strata") -}}
{{- if .quota }}{{ $_ := set $objects "ResourceQuota" (list "strata") }}{{ end -}}
{{- if .network.enabled }}{{ $_ := set $objects "NetworkPolicy" (list "strata-default" "strata-job") }}{{ end -}}
{{- $tenants = append $tenants (dict
  "namespace" .namespace "pod_security" .podSecurity "service_account" .serviceAccount.name
  "pod_template" .podTemplate.name "queues" $queues "objects" $objects) -}}
{{- end -}}
{{- $kueue := .Values.queues.kueue -}}
{{- with .Values.tests -}}
{{- dict
  "tenants" $tenants
  "queue_required" $.Values.queues.required
  "kueue_config" (list $kueue.namespace $kueue.configMap)
  "flyte" (list .flyte.namespace .flyte.serviceAccount)
  "image" (include "strata.image" $)
  "python" .python
  "job_resources" .job.resources
  "job_seconds" (int64 .job.seconds) | toJson -}}
{{- end -}}
{{- end }}

{{/* Hooks of `helm test`, in the order of their weights; failed pods stay, for their logs. */}}
{{- define "strata.tests.pod" -}}
helm.sh/hook: test
helm.sh/hook-weight: {{ .weight | quote }}
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded
{{- end }}

{{- define "strata.tests.rights" -}}
helm.sh/hook: test
helm.sh/hook-weight: "-1"
helm.sh/hook-delete-policy: before-hook-creation,hook-succeeded,hook-failed
{{- end }}
