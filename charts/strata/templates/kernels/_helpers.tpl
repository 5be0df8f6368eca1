{{/* Where kernels are baked to: another image or other models, another folder. */}}
{{- define "strata.bake.folder" -}}
{{- $what := printf "%s %s" (include "strata.image" .) (toJson (pick .Values.kernels.bake "models" "archs")) -}}
{{- printf "%s/%s" .Values.kernels.bake.path ($what | sha256sum | trunc 10) -}}
{{- end }}

{{/* The pod that bakes; takes the release's context and the tenant. */}}
{{- define "strata.bake.pod" -}}
{{- $bake := .root.Values.kernels.bake -}}
restartPolicy: Never
serviceAccountName: {{ .tenant.serviceAccount.name | quote }}
automountServiceAccountToken: false
securityContext:
  {{- include "strata.podSecurity" .tenant.podTemplate | nindent 2 }}
{{- with .tenant.podTemplate.imagePullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . | quote }}
  {{- end }}
{{- end }}
containers:
  - name: bake
    image: {{ include "strata.image" .root | quote }}
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    # Baked beside its place, then moved there: pods see all of it or nothing, and an attempt that was killed
    # leaves nothing in the next one's way.
    command:
      - sh
      - -ec
      - |
        test ! -e "$FOLDER" || exit 0
        python -m strata_kernels bake --model "$MODELS" --arch "$ARCHS" --out "$FOLDER.$HOSTNAME"
        mv -T "$FOLDER.$HOSTNAME" "$FOLDER"
    env:
      - name: MODELS
        value: {{ join "," $bake.models | quote }}
      - name: ARCHS
        value: {{ join "," $bake.archs | quote }}
      - name: FOLDER
        value: {{ include "strata.bake.folder" .root }}
      - name: TRITON_CACHE_DIR
        value: /tmp/triton
    securityContext:
      {{- include "strata.containerSecurity" .root | nindent 6 }}
    resources:
      requests:
        {{- toYaml $bake.resources | nindent 8 }}
      limits:
        {{- toYaml $bake.resources | nindent 8 }}
    volumeMounts:
      - name: baked-kernels
        mountPath: {{ $bake.path }}
volumes:
  - name: baked-kernels
    persistentVolumeClaim:
      claimName: {{ $bake.claim | quote }}
{{- end }}
