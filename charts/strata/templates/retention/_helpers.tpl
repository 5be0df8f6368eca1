{{/* A CronJob that removes what is old; takes `root`, the namespace, and the name of the program's argument. */}}
{{- define "strata.retention.job" -}}
apiVersion: batch/v1
kind: CronJob
metadata:
  name: {{ .root.Release.Name }}-retention-{{ .what }}
  namespace: {{ .namespace }}
  labels:
    {{- include "strata.labels" .root | nindent 4 }}
spec:
  schedule: {{ .root.Values.retention.schedule | quote }}
  concurrencyPolicy: Forbid
  successfulJobsHistoryLimit: 3
  failedJobsHistoryLimit: 3
  jobTemplate:
    spec:
      backoffLimit: 0
      # A pod that never starts must not keep all later ones from running.
      activeDeadlineSeconds: 21600
      template:
        {{- .template | nindent 8 }}
{{- end }}
