{{/* A pod of a rollout server: all of it, its leader, or one of its other nodes. */}}
{{- define "nightshift.rolloutPod" -}}
{{- $root := .root }}
{{- $r := .root.Values.rollout }}
{{- $worker := eq .part "worker" }}
{{- $component := ternary "rollout-worker" "rollout" $worker -}}
metadata:
  labels:
    {{- include "nightshift.labels" (dict "root" $root "component" $component) | nindent 4 }}
spec:
  serviceAccountName: {{ include "nightshift.serviceAccount" $root }}
  automountServiceAccountToken: false
  terminationGracePeriodSeconds: {{ add $r.drainSeconds 30 }}
  {{- include "nightshift.pullSecrets" $root | nindent 2 }}
  {{- include "nightshift.priority" (dict "root" $root "class" "replaceable") | nindent 2 }}
  {{- include "nightshift.placement" $r | nindent 2 }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "nightshift.selector" (dict "root" $root "component" $component) | nindent 10 }}
  securityContext:
    {{- include "nightshift.podSecurity" $root | nindent 4 }}
  containers:
    - name: vllm
      image: {{ include "nightshift.image" (dict "root" $root "image" "rollout") }}
      imagePullPolicy: {{ $root.Values.images.rollout.pullPolicy }}
      {{- if $worker }}
      # The other nodes of a server: no HTTP; its leader tells their processes what to do.
      command: [vllm, serve]
      {{- end }}
      # The flags of services/rollout/command.py; a test compares them.
      args:
        {{- if $worker }}
        - {{ required "rollout.model must name a model that the pods can read" $r.model }}
        - --headless
        {{- else }}
        - --model={{ required "rollout.model must name a model that the pods can read" $r.model }}
        {{- end }}
        {{- if gt (int $r.nodes) 1 }}
        # LeaderWorkerSet sets the variables.
        - --distributed-executor-backend=mp
        - --nnodes={{ $r.nodes }}
        - --node-rank=$(LWS_WORKER_INDEX)
        - --master-addr=$(LWS_LEADER_ADDRESS)
        {{- end }}
        - --served-model-name=policy
        - --host=0.0.0.0
        - --port={{ $r.port }}
        - --dtype={{ $r.dtype }}
        - --max-model-len={{ $r.maxModelLen }}
        - --max-num-seqs={{ $r.maxNumSeqs }}
        - --kv-cache-memory-bytes={{ mul $r.kvCacheGiB 1073741824 }}
        - --tensor-parallel-size={{ $r.tensorParallelSize }}
        - --logprobs-mode=processed_logprobs
        - --generation-config=vllm
        - --enable-request-id-headers
        - --weight-transfer-config={"backend":{{ $r.weightBackend | quote }}}
        - --middleware=services.rollout.route.Route
        - --middleware=services.rollout.guard.Guard
        - --disable-uvicorn-access-log
        - --disable-fastapi-docs
        {{- with concat $r.versionFlags $r.extraArgs }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      env:
        - name: NIGHTSHIFT_ROLLOUT_TOKEN
          valueFrom:
            secretKeyRef:
              name: {{ required "rollout.token.existingSecret must name a secret: a server without a token must not start" $r.token.existingSecret }}
              key: {{ $r.token.key }}
        # The only address that weights are fetched from, and where they lie then.
        - name: NIGHTSHIFT_WEIGHT_URL
          value: {{ include "nightshift.weightUrl" $root }}
        - {name: NIGHTSHIFT_WEIGHT_CACHE, value: /dev/shm/weights}
        - {name: HOME, value: /tmp}
        - {name: HF_HUB_OFFLINE, value: "1"}
        - {name: VLLM_SERVER_DEV_MODE, value: "1"}
        - {name: VLLM_NO_USAGE_STATS, value: "1"}
        - {name: DO_NOT_TRACK, value: "1"}
        - {name: OTEL_SERVICE_NAME, value: nightshift.rollout}
        # What the audit of a run believes; the run's agent fetches it through the route.
        - {name: NIGHTSHIFT_REQUEST_LOG, value: /tmp/requests.jsonl}
        - name: NIGHTSHIFT_SERVER_NAME
          valueFrom:
            fieldRef: {fieldPath: metadata.name}
      ports:
        - {name: http, containerPort: {{ $r.port }}}
      {{- if $worker }}
      # It is of use while its leader answers, and the group is made anew as a whole.
      {{- $asks := list "python3" "-c" (printf "import os, urllib.request as r; r.urlopen('http://' + os.environ['LWS_LEADER_ADDRESS'] + ':%d/health', timeout=8)" (int $r.port)) }}
      startupProbe:
        exec: {command: {{ toJson $asks }}}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: {{ mul $r.startupMinutes 6 }}
      livenessProbe:
        exec: {command: {{ toJson $asks }}}
        periodSeconds: 20
        timeoutSeconds: 10
        failureThreshold: 6
      readinessProbe:
        exec: {command: {{ toJson $asks }}}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 2
      {{- else }}
      startupProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 10
        failureThreshold: {{ mul $r.startupMinutes 6 }}
      livenessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 10
        timeoutSeconds: 10
        failureThreshold: 6
      readinessProbe:
        httpGet: {path: /health, port: http}
        periodSeconds: 5
        timeoutSeconds: 5
        failureThreshold: 2
      {{- end }}
      lifecycle:
        preStop:
          # Short responses end; what runs on is kept by the orchestrator as a prefix and goes on elsewhere.
          exec: {command: [sleep, {{ $r.drainSeconds | quote }}]}
      securityContext:
        {{- include "nightshift.containerSecurity" $root | nindent 8 }}
      resources:
        {{- include "nightshift.resources" (dict "resources" $r.resources "gpus" (div $r.tensorParallelSize $r.nodes)) | nindent 8 }}
      volumeMounts:
        {{- include "nightshift.scratchMounts" $root | nindent 8 }}
  volumes:
    {{- include "nightshift.scratch" (dict "root" $root "shm" $r.shm) | nindent 4 }}
{{- end }}
