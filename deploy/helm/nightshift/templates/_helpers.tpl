{{- define "nightshift.name" -}}
{{- if contains .Chart.Name .Release.Name }}{{ .Release.Name }}{{ else }}{{ .Release.Name }}-{{ .Chart.Name }}{{ end -}}
{{- end }}

{{- define "nightshift.labels" -}}
app.kubernetes.io/name: nightshift
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{- define "nightshift.selector" -}}
app.kubernetes.io/name: nightshift
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "nightshift.image" -}}
{{- $image := index .root.Values.images .image -}}
{{- if $image.digest }}{{ $image.repository }}@{{ $image.digest }}{{ else }}{{ $image.repository }}:{{ $image.tag | default .root.Chart.AppVersion }}{{ end -}}
{{- end }}

{{- define "nightshift.serviceAccount" -}}
{{- .Values.serviceAccount.name | default (include "nightshift.name" .) -}}
{{- end }}

{{- define "nightshift.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "nightshift.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* requests and limits, with GPUs added to both. */}}
{{- define "nightshift.resources" -}}
requests:
  {{- toYaml .resources.requests | nindent 2 }}
  {{- if .gpus }}
  nvidia.com/gpu: {{ .gpus }}
  {{- end }}
limits:
  {{- toYaml .resources.limits | nindent 2 }}
  {{- if .gpus }}
  nvidia.com/gpu: {{ .gpus }}
  {{- end }}
{{- end }}

{{/* What every pod has: scratch space beside a read-only root, and memory to share. */}}
{{- define "nightshift.scratch" -}}
- name: tmp
  emptyDir: {}
- name: shm
  emptyDir:
    medium: Memory
    sizeLimit: {{ .shm }}
{{- if .root.Values.models.existingClaim }}
- name: models
  persistentVolumeClaim:
    claimName: {{ .root.Values.models.existingClaim }}
    readOnly: true
{{- end }}
{{- end }}

{{- define "nightshift.scratchMounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: shm, mountPath: /dev/shm}
{{- if .Values.models.existingClaim }}
- {name: models, mountPath: {{ .Values.models.mountPath }}, readOnly: true}
{{- end }}
{{- end }}

{{- define "nightshift.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "nightshift.pullSecrets" -}}
{{- with .Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "nightshift.priority" -}}
{{- if .root.Values.priorityClass.create }}
priorityClassName: {{ include "nightshift.name" .root }}-{{ .class }}
{{- end }}
{{- end }}

{{/* Probes of a Ray node: its agent says whether the raylet answers. */}}
{{- define "nightshift.rayProbes" -}}
startupProbe:
  httpGet: {path: /api/local_raylet_healthz, port: 52365}
  periodSeconds: 5
  failureThreshold: 120
livenessProbe:
  httpGet: {path: /api/local_raylet_healthz, port: 52365}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 12
readinessProbe:
  httpGet: {path: /api/local_raylet_healthz, port: 52365}
  periodSeconds: 5
  timeoutSeconds: 5
  failureThreshold: 3
{{- end }}

{{/* A pod of Ray: head or workers of the trainer's cluster or of the scorers'. */}}
{{- define "nightshift.rayPod" -}}
metadata:
  labels:
    {{- include "nightshift.labels" (dict "root" .root "component" .component) | nindent 4 }}
spec:
  serviceAccountName: {{ include "nightshift.serviceAccount" .root }}
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: 120
  {{- include "nightshift.pullSecrets" .root | nindent 2 }}
  {{- include "nightshift.priority" (dict "root" .root "class" "steady") | nindent 2 }}
  {{- include "nightshift.placement" . | nindent 2 }}
  securityContext:
    {{- include "nightshift.podSecurity" .root | nindent 4 }}
  containers:
    - name: {{ .container }}
      image: {{ include "nightshift.image" (dict "root" .root "image" "full") }}
      imagePullPolicy: {{ .root.Values.images.full.pullPolicy }}
      env:
        - {name: RAY_USAGE_STATS_ENABLED, value: "0"}
        - {name: HOME, value: /tmp}
        - {name: HF_HUB_OFFLINE, value: "1"}
        {{- if .root.Values.ray.token.existingSecret }}
        - {name: RAY_AUTH_MODE, value: token}
        - name: RAY_AUTH_TOKEN
          valueFrom:
            secretKeyRef:
              name: {{ .root.Values.ray.token.existingSecret }}
              key: {{ .root.Values.ray.token.key }}
        {{- end }}
      ports:
        {{- toYaml .ports | nindent 8 }}
      lifecycle:
        preStop:
          exec: {command: [ray, stop, --grace-period, "60"]}
      securityContext:
        {{- include "nightshift.containerSecurity" .root | nindent 8 }}
      {{- include "nightshift.rayProbes" .root | nindent 6 }}
      resources:
        {{- include "nightshift.resources" . | nindent 8 }}
      volumeMounts:
        {{- include "nightshift.scratchMounts" .root | nindent 8 }}
        {{- if .job }}
        - {name: job, mountPath: /etc/nightshift, readOnly: true}
        {{- end }}
  volumes:
    {{- include "nightshift.scratch" . | nindent 4 }}
    {{- if .job }}
    - name: job
      configMap:
        name: {{ .job.existingConfigMap }}
        items:
          - {key: {{ .job.key }}, path: job.yaml}
    {{- end }}
{{- end }}

{{/* Where rollout servers fetch weights from: the pod in which trainers run. */}}
{{- define "nightshift.weightUrl" -}}
{{- if .Values.agent.enabled -}}
http://{{ include "nightshift.name" . }}-agent:{{ add .Values.agent.port 3 }}
{{- else -}}
http://{{ include "nightshift.name" . }}-orchestrator:{{ .Values.orchestrator.weightsPort }}
{{- end -}}
{{- end }}

{{/* Addresses of the rollout servers that are always there, separated by spaces. */}}
{{- define "nightshift.rolloutUrls" -}}
{{- $r := .Values.rollout -}}
{{- $name := printf "%s-rollout" (include "nightshift.name" .) -}}
{{- range $at := until (int (ternary $r.autoscaling.minReplicas $r.replicas $r.autoscaling.enabled)) -}}
{{- if $at }} {{ end }}http://{{ $name }}-{{ $at }}.{{ $name }}:{{ $r.port }}
{{- end -}}
{{- end }}
