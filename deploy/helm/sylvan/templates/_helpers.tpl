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
{{- $defaults := dict "role" "regular" "replicas" 1 "nodes" 1 "model" "sapling" "config" dict "env" list "sharedMemory" "1Gi" "drainSeconds" 120 "startupSeconds" 600 -}}
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

{{/* What a pod of a pool does: root, pool, full, secret, settings, args; `served` if clients are answered there. */}}
{{- define "sylvan.server" -}}
{{- $root := .root }}{{ $pool := .pool }}{{ $full := .full }}{{ $secret := .secret }}{{ $settings := .settings -}}
automountServiceAccountToken: false
enableServiceLinks: false
terminationGracePeriodSeconds: {{ add $pool.drainSeconds 20 }}
securityContext:
  {{- include "sylvan.podSecurity" $root | nindent 2 }}
{{- with $root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
containers:
  - name: sylvan
    image: {{ include "sylvan.image" $root }}
    imagePullPolicy: {{ $root.Values.image.pullPolicy }}
    args: [serve, {{ $pool.model | quote }}, --config, /etc/sylvan/config/serve.yaml{{ range .args }}, {{ . | quote }}{{ end }}]
    securityContext:
      {{- include "sylvan.containerSecurity" $root | nindent 6 }}
    env:
      {{- include "sylvan.keyEnv" (dict "name" "SYLVAN_SERVER__API_KEY" "secret" $secret "key" "gateway-key") | nindent 6 }}
      {{- include "sylvan.keyEnv" (dict "name" "SYLVAN_SERVER__GATEWAY_KEY" "secret" $secret "key" "gateway-key") | nindent 6 }}
      {{- include "sylvan.keyEnv" (dict "name" "SYLVAN_SERVER__ADMIN_API_KEY" "secret" $secret "key" "admin-key") | nindent 6 }}
      {{- if not (or $root.Values.cache.existingClaim (hasKey $settings "load_cache")) }}
      # Packed weights would outlive nothing, and a pod that fills its volume is evicted.
      - name: SYLVAN_LOAD_CACHE
        value: none
      {{- end }}
      {{- with $pool.env }}
      {{- toYaml . | nindent 6 }}
      {{- end }}
    ports:
      - name: http
        containerPort: 30000
      {{- if ne $pool.role "regular" }}
      - name: bootstrap
        containerPort: {{ $settings.disagg.bootstrap_port }}
      {{- end }}
    lifecycle:
      {{- include "sylvan.lifecycle" $root | nindent 6 }}
    {{- if .served }}
    # Nothing listens before the model is loaded.
    startupProbe:
      httpGet: {path: /live, port: http}
      periodSeconds: 2
      timeoutSeconds: 2
      failureThreshold: {{ div $pool.startupSeconds 2 }}
    # Requests are admitted and a scheduler shows life; a pod that drains gets nothing new.
    readinessProbe:
      httpGet: {path: /ready, port: http}
      periodSeconds: 5
      timeoutSeconds: 3
      failureThreshold: 2
    # Processes run or are being restarted: overload and a restart inside do not end the pod.
    livenessProbe:
      httpGet: {path: /live, port: http}
      periodSeconds: 10
      timeoutSeconds: 5
      failureThreshold: 6
    {{- end }}
    resources:
      {{- toYaml $pool.resources | nindent 6 }}
    volumeMounts:
      - {name: config, mountPath: /etc/sylvan/config, readOnly: true}
      {{- if ne $pool.role "regular" }}
      - {name: secret, mountPath: /etc/sylvan/secret, readOnly: true}
      {{- end }}
      - {name: tmp, mountPath: /tmp}
      - {name: shm, mountPath: /dev/shm}
      - {name: cache, mountPath: /var/cache/sylvan}
      {{- if $root.Values.models.existingClaim }}
      - {name: models, mountPath: /models, readOnly: true}
      {{- end }}
volumes:
  - name: config
    configMap:
      name: {{ $full }}
  {{- if ne $pool.role "regular" }}
  - name: secret
    secret:
      secretName: {{ $secret }}
      defaultMode: 0440
      items:
        - {key: disagg-secret, path: disagg-secret}
  {{- end }}
  - name: tmp
    emptyDir:
      sizeLimit: 1Gi
  - name: shm
    emptyDir:
      medium: Memory
      sizeLimit: {{ $pool.sharedMemory }}
  - name: cache
    {{- if $root.Values.cache.existingClaim }}
    persistentVolumeClaim:
      claimName: {{ $root.Values.cache.existingClaim }}
    {{- else }}
    emptyDir:
      sizeLimit: {{ $root.Values.cache.sizeLimit }}
    {{- end }}
  {{- if $root.Values.models.existingClaim }}
  - name: models
    persistentVolumeClaim:
      claimName: {{ $root.Values.models.existingClaim }}
      readOnly: true
  {{- end }}
{{- with $pool.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $pool.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $pool.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $pool.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
