{{/* Every namespace with its settings, as a JSON list: tenantDefaults, and what the tenant says over it key by key. */}}
{{- define "strata.tenants" -}}
{{- $namespaces := list -}}
{{- range $tenant := .Values.tenants -}}
{{- $settings := mergeOverwrite (deepCopy $.Values.tenantDefaults) (omit (deepCopy $tenant) "project" "domains") -}}
{{- range $domain := $tenant.domains -}}
{{- $place := dict "project" $tenant.project "domain" $domain "namespace" (printf "%s-%s" $tenant.project $domain) -}}
{{- $namespaces = append $namespaces (merge $place $settings) -}}
{{- end -}}
{{- end -}}
{{- toJson $namespaces -}}
{{- end }}

{{/* Selects the namespaces of all tenants. */}}
{{- define "strata.tenantNamespaces" -}}
matchExpressions:
  - key: kubernetes.io/metadata.name
    {{- with include "strata.tenants" . | fromJsonArray }}
    operator: In
    values:
      {{- range . }}
      - {{ .namespace }}
      {{- end }}
    {{- else }}
    # A list may not be empty. Every namespace has this label, so none is selected.
    operator: DoesNotExist
    {{- end }}
{{- end }}

{{/* Labels of a tenant's objects; takes the release's context and the tenant. */}}
{{- define "strata.tenantLabels" -}}
{{ include "strata.labels" .root }}
{{- with .tenant }}
strata/tenant: {{ .namespace }}
strata/project: {{ .project | quote }}
strata/domain: {{ .domain | quote }}
{{- end }}
{{- end }}

{{/* Tolerations with their defaults: Kubernetes' own operator is Equal, also where there is no value to compare with. */}}
{{- define "strata.tolerations" -}}
{{- range $i, $toleration := . }}
{{- if $i }}{{ print "\n" }}{{ end -}}
- key: {{ .key | quote }}
  operator: {{ .operator | default (ternary "Equal" "Exists" (not (empty .value))) }}
  {{- with .value }}
  value: {{ . | quote }}
  {{- end }}
  {{- with .effect }}
  effect: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* A NetworkPolicy's entries for a list of destinations. */}}
{{- define "strata.destinations" -}}
{{- range $i, $destination := . }}
{{- if $i }}{{ print "\n" }}{{ end -}}
- to:
    {{- if .cidr }}
    - ipBlock:
        cidr: {{ .cidr | quote }}
    {{- else }}
    - namespaceSelector:
        matchLabels:
          kubernetes.io/metadata.name: {{ .namespace | quote }}
      {{- with .podLabels }}
      podSelector:
        matchLabels:
          {{- toYaml . | nindent 10 }}
      {{- end }}
    {{- end }}
  {{- with .ports }}
  ports:
    {{- range . }}
    - port: {{ int64 .port }}
      protocol: {{ .protocol | default "TCP" }}
    {{- end }}
  {{- end }}
{{- end }}
{{- end }}

{{/* The pod that Flyte starts from; takes the release's context, the tenant, and a variant or nothing. */}}
{{- define "strata.podTemplate" -}}
{{- $tenant := .tenant -}}
{{- $template := $tenant.podTemplate -}}
{{- $variant := .variant | default dict -}}
metadata:
  {{- with merge (dict) ($variant.annotations | default dict) $template.annotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  labels:
    {{- merge (dict "strata/tenant" $tenant.namespace) $template.labels | toYaml | nindent 4 }}
spec:
  serviceAccountName: {{ $tenant.serviceAccount.name | quote }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ int64 $template.terminationGracePeriodSeconds }}
  securityContext:
    {{- include "strata.podSecurity" $template | nindent 4 }}
  {{- with $template.imagePullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . | quote }}
    {{- end }}
  {{- end }}
  {{- with merge (dict) ($variant.nodeSelector | default dict) $template.nodeSelector }}
  nodeSelector:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with concat $template.tolerations ($variant.tolerations | default list) }}
  tolerations:
    {{- include "strata.tolerations" . | nindent 4 }}
  {{- end }}
  containers:
    # What Flyte's containers start from, whatever they are called. Flyte sets the image, and not when it is pulled.
    - name: default
      image: set-by-flyte
      imagePullPolicy: {{ $template.imagePullPolicy }}
      {{- with $template.workingDir }}
      workingDir: {{ . }}
      {{- end }}
      securityContext:
        {{- include "strata.containerSecurity" . | nindent 8 }}
      env:
        - name: TRITON_CACHE_DIR
          value: {{ $template.caches.triton.path }}
        - name: HF_HOME
          value: {{ $template.caches.huggingFace.path }}
        # By which a pod's kept log names it.
        - name: STRATA_POD
          valueFrom:
            fieldRef: {fieldPath: metadata.name}
        # The first task of a run refuses what no queue will ever admit.
        - name: STRATA_QUEUES
          valueFrom:
            configMapKeyRef: {name: strata-queues, key: shares.json, optional: true}
        {{- if .root.Values.kernels.bake.models }}
        - name: STRATA_BAKED_KERNELS
          value: {{ include "strata.bake.folder" .root }}
        {{- end }}
        {{- with .root.Values.kernels.store }}
        {{- if .url }}
        - name: STRATA_KERNEL_STORE
          value: {{ .url | quote }}
        - name: KERNEL_STORE_KEY
          valueFrom:
            secretKeyRef:
              name: {{ .secret | quote }}
              key: KERNEL_STORE_KEY
              # A tenant without it compiles; its pods are not kept from starting.
              optional: true
        {{- end }}
        {{- end }}
        {{- range $name, $value := merge (dict) ($variant.env | default dict) $template.env }}
        - name: {{ $name | quote }}
          value: {{ $value | quote }}
        {{- end }}
      {{- with $template.envSecrets }}
      envFrom:
        {{- range . }}
        - secretRef:
            name: {{ . | quote }}
        {{- end }}
      {{- end }}
      {{- with $variant.resources }}
      resources:
        requests:
          {{- toYaml . | nindent 10 }}
        limits:
          {{- toYaml . | nindent 10 }}
      {{- end }}
      volumeMounts:
        - name: triton-cache
          mountPath: {{ $template.caches.triton.path }}
        - name: huggingface-cache
          mountPath: {{ $template.caches.huggingFace.path }}
        {{- with .root.Values.kernels.bake }}
        {{- if .models }}
        - name: baked-kernels
          mountPath: {{ .path }}
          readOnly: true
        {{- end }}
        {{- end }}
        {{- with $template.volumes }}
        {{- include "strata.volumeMounts" . | nindent 8 }}
        {{- end }}
  volumes:
    - name: triton-cache
      emptyDir:
        sizeLimit: {{ $template.caches.triton.sizeLimit }}
    - name: huggingface-cache
      emptyDir:
        sizeLimit: {{ $template.caches.huggingFace.sizeLimit }}
    {{- with .root.Values.kernels.bake }}
    {{- if .models }}
    - name: baked-kernels
      persistentVolumeClaim:
        claimName: {{ .claim | quote }}
        readOnly: true
    {{- end }}
    {{- end }}
    {{- with $template.volumes }}
    {{- include "strata.volumes" . | nindent 4 }}
    {{- end }}
{{- end }}

{{- define "strata.volumeMounts" -}}
{{- range $i, $volume := . }}
{{- if $i }}{{ print "\n" }}{{ end -}}
- name: {{ .name | quote }}
  mountPath: {{ .mountPath }}
  readOnly: {{ .readOnly | default false }}
{{- end }}
{{- end }}

{{- define "strata.volumes" -}}
{{- range $i, $volume := . }}
{{- if $i }}{{ print "\n" }}{{ end -}}
- name: {{ .name | quote }}
  persistentVolumeClaim:
    claimName: {{ .claim | quote }}
    readOnly: {{ .readOnly | default false }}
{{- end }}
{{- end }}

{{/* Who may submit runs without Flyte, of all tenants, as JSON. */}}
{{- define "strata.submitters" -}}
{{- $submitters := list -}}
{{- range include "strata.tenants" . | fromJsonArray }}{{ $submitters = concat $submitters .submitters }}{{ end -}}
{{- toJson $submitters -}}
{{- end }}
