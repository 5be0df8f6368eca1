{{/* Labels of every object. */}}
{{- define "strata.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
app.kubernetes.io/name: strata
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{/* The project's image. */}}
{{- define "strata.image" -}}
{{- $image := .Values.image -}}
{{- $repository := required "image.repository is empty, and tests and Jobs run the project's image; set it, or turn them off" $image.repository -}}
{{- $tag := default .Chart.AppVersion $image.tag -}}
{{- printf "%s%s%s" $repository (ternary "@" ":" (hasPrefix "sha256:" $tag)) $tag -}}
{{- end }}

{{/* A quantity of Kubernetes' as a plain number: 500m is 0.5, 1Ki is 1024. */}}
{{- define "strata.number" -}}
{{- if kindIs "string" . -}}
{{- $factors := dict "" 1 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15
  "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 -}}
{{- $digits := regexFind "^[0-9.]+" . -}}
{{- mulf (float64 $digits) (get $factors (trimPrefix $digits .)) -}}
{{- else -}}
{{- float64 . -}}
{{- end -}}
{{- end }}

{{/* What the pod security level "restricted" asks of a container. */}}
{{- define "strata.containerSecurity" -}}
allowPrivilegeEscalation: false
capabilities:
  drop: [ALL]
{{- end }}

{{/* What it asks of a pod; takes runAsUser, runAsGroup, fsGroup. */}}
{{- define "strata.podSecurity" -}}
runAsNonRoot: true
runAsUser: {{ int64 .runAsUser }}
runAsGroup: {{ int64 .runAsGroup }}
fsGroup: {{ int64 .fsGroup }}
# A large volume is not walked through at every start.
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{/*
Spec of a pod that runs a program of the project's image: `root`, its account, the container's name, the program as the
arguments of -m, the variable and value that it reads, its resources, more variables if it has any, and the secret that
it logs in to Flyte with, if it does.
*/}}
{{- define "strata.programPod" -}}
{{- $values := .root.Values -}}
restartPolicy: Never
serviceAccountName: {{ .account }}
securityContext:
  {{- include "strata.podSecurity" $values.tenantDefaults.podTemplate | nindent 2 }}
{{- with $values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
containers:
  - name: {{ .name }}
    image: {{ include "strata.image" .root | quote }}
    imagePullPolicy: {{ $values.image.pullPolicy }}
    command: {{ concat (list $values.tests.python "-m") .program | toJson }}
    securityContext:
      {{- include "strata.containerSecurity" .root | nindent 6 }}
    env:
      - name: {{ .variable }}
        value: {{ .value | quote }}
      {{- range $name, $value := merge (dict) (.env | default dict) $values.tests.env }}
      - name: {{ $name | quote }}
        value: {{ $value | quote }}
      {{- end }}
      {{- with .login }}
      - name: FLYTE_CREDENTIALS_AUTH_MODE
        value: client_credentials
      {{- range $name, $key := dict "CLIENT_ID" "client_id" "CLIENT_SECRET" "client_secret" }}
      - name: FLYTE_CREDENTIALS_{{ $name }}
        valueFrom: {secretKeyRef: {name: {{ $.login }}, key: {{ $key }}}}
      {{- end }}
      {{- end }}
    resources:
      requests:
        {{- toYaml .resources | nindent 8 }}
      limits:
        {{- toYaml .resources | nindent 8 }}
    {{- with $values.tests.volumes }}
    volumeMounts:
      {{- include "strata.volumeMounts" . | nindent 6 }}
    {{- end }}
{{- with $values.tests.volumes }}
volumes:
  {{- include "strata.volumes" . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The root of the tree of a cohort; empty where it is below itself. Takes `root`, the cohort, and the path up to it. */}}
{{- define "strata.rootCohort" -}}
{{- $parent := "" -}}
{{- range .root.Values.queues.cohorts }}{{ if eq .name $.cohort }}{{ $parent = .parent | default "" }}{{ end }}{{ end -}}
{{- if has .cohort .path -}}
{{- else if $parent -}}
{{- include "strata.rootCohort" (dict "root" .root "cohort" $parent "path" (append .path .cohort)) -}}
{{- else -}}
{{- .cohort -}}
{{- end -}}
{{- end }}
