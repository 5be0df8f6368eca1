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
{{- $allReduce := include "strata.tests.allReduce" . -}}
{{- with .Values.tests -}}
{{- dict
  "tenants" $tenants
  "queue_required" $.Values.queues.required
  "kueue_config" (list $kueue.namespace $kueue.configMap)
  "flyte" (list $.Values.flyte.namespace $.Values.flyte.serviceAccount)
  "image" (include "strata.image" $)
  "python" .python
  "job_resources" .job.resources
  "job_seconds" (int64 .job.seconds)
  "all_reduce" (ternary nil (fromJson $allReduce) (empty $allReduce)) | toJson -}}
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

{{/* The test of the bandwidth between nodes, as JSON: by the first tenant with a queue. Empty for none. */}}
{{- define "strata.tests.allReduce" -}}
{{- $test := .Values.tests.allReduce -}}
{{- $tenant := dict -}}
{{- range include "strata.tenants" . | fromJsonArray | reverse }}{{ if .queues }}{{ $tenant = . }}{{ end }}{{ end -}}
{{- if and $test.nodes $tenant -}}
{{- dict
  "namespace" $tenant.namespace
  "queue" (first $tenant.queues).name
  "pod_template" ($test.podTemplate | default $tenant.podTemplate.name)
  "nodes" (int64 $test.nodes) "gpus" (int64 $test.gpus) "gpu_resource" $test.gpuResource
  "resources" $test.resources "min_bandwidth" $test.minBandwidth "largest" (int64 $test.largest)
  "seconds" (int64 $test.seconds) | toJson -}}
{{- end -}}
{{- end }}
