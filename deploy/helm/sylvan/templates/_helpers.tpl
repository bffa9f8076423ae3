{{- define "sylvan.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}

{{- define "sylvan.labels" -}}
app.kubernetes.io/name: sylvan
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end -}}

{{- define "sylvan.selector" -}}
app.kubernetes.io/name: sylvan
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "sylvan.image" -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default (printf "%s-cpu" .Chart.AppVersion)) -}}
{{- end -}}

{{- define "sylvan.secret" -}}
{{- .Values.auth.existingSecret | default (printf "%s-keys" (include "sylvan.name" .)) -}}
{{- end -}}

{{/* A pool with what it leaves out taken from the first one: helm merges maps by name only. */}}
{{- define "sylvan.pool" -}}
{{- $defaults := dict "role" "regular" "replicas" 1 "model" "sapling" "config" dict "env" list "sharedMemory" "1Gi" "drainSeconds" 120 "startupSeconds" 600 -}}
{{- $defaults = merge $defaults (dict "strategy" (dict "maxSurge" 1 "maxUnavailable" 0) "disruptionBudget" (dict "maxUnavailable" 1)) -}}
{{- $defaults = merge $defaults (dict "autoscaling" (dict "kind" "" "minReplicas" 1 "maxReplicas" 8 "queuedRequests" 4 "kvUse" 0.8 "stabilizationSeconds" 300)) -}}
{{- $defaults = merge $defaults (dict "resources" dict "nodeSelector" dict "tolerations" list "affinity" dict "topologySpreadConstraints" list) -}}
{{- mergeOverwrite $defaults (deepCopy .) | toYaml -}}
{{- end -}}

{{- define "sylvan.podSecurity" -}}
runAsNonRoot: true
runAsUser: 65532
runAsGroup: 65532
fsGroup: 65532
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end -}}

{{- define "sylvan.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/* A pod goes on for some seconds while others still learn that it ends. */}}
{{- define "sylvan.lifecycle" -}}
preStop:
  exec:
    command: [sleep, "5"]
{{- end -}}

{{- define "sylvan.keyEnv" -}}
- name: {{ .name }}
  valueFrom:
    secretKeyRef:
      name: {{ .secret }}
      key: {{ .key }}
{{- end -}}
