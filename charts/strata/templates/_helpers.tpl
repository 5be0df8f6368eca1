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
