{{/* What the pods of all roles share. Arguments: root, role, group, block (the role's values, merged). */}}

{{- define "baton.podMetadata" -}}
labels:
  {{- $labels := include "baton.labels" (dict "root" .root "component" .role "group" .group) | fromYaml }}
  {{- /* The chart's versions would replace every pod at each release of the chart. */}}
  {{- $labels = omit $labels "helm.sh/chart" "app.kubernetes.io/version" }}
  {{- toYaml (merge $labels (.block.podLabels | default dict)) | nindent 2 }}
annotations:
  kubectl.kubernetes.io/default-container: {{ .role }}
  {{- $template := ternary .root.Values.model.chatTemplate "" (eq .role "conductor") }}
  checksum/settings: {{ printf "%s\n%s" (include "baton.settings" .) $template | sha256sum }}
  {{- with .block.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{/* Whether these pods run as root: to pin memory for RDMA. */}}
{{- define "baton.asRoot" -}}
{{- if and (dig "rdma" "enabled" false .block) (dig "rdma" "runAsRoot" true .block) }}yes{{ end -}}
{{- end -}}

{{- define "baton.podSecurityContext" -}}
{{- $context := dict "runAsNonRoot" true "runAsUser" 10001 "runAsGroup" 10001 "fsGroup" 10001 -}}
{{- if include "baton.asRoot" . -}}
{{- $context = dict "runAsNonRoot" false "runAsUser" 0 "runAsGroup" 0 "fsGroup" 10001 -}}
{{- end -}}
{{- $_ := set $context "fsGroupChangePolicy" "OnRootMismatch" -}}
{{- $_ := set $context "seccompProfile" (dict "type" "RuntimeDefault") -}}
{{- toYaml (mergeOverwrite $context (deepCopy (.block.podSecurityContext | default dict))) -}}
{{- end -}}

{{- define "baton.securityContext" -}}
{{- $context := dict "allowPrivilegeEscalation" false "readOnlyRootFilesystem" true -}}
{{- $capabilities := dict "drop" (list "ALL") -}}
{{- if dig "rdma" "enabled" false .block -}}
{{- $_ := set $capabilities "add" (list "IPC_LOCK") -}}
{{- end -}}
{{- $_ := set $context "capabilities" $capabilities -}}
{{- toYaml (mergeOverwrite $context (deepCopy (.block.securityContext | default dict))) -}}
{{- end -}}

{{/* That of init containers: never a capability. */}}
{{- define "baton.initSecurityContext" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end -}}

{{/*
Replicas of a workload. If KEDA sets them: as many as there are, since a workload without the field has one.
*/}}
{{- define "baton.replicas" -}}
{{- if .block.autoscaling.enabled -}}
{{- $kind := ternary "Deployment" "StatefulSet" (eq .role "conductor") -}}
{{- $name := printf "%s-%s" (include "baton.fullname" .root) .workload -}}
{{- $there := lookup "apps/v1" $kind .root.Release.Namespace $name -}}
{{ dig "spec" "replicas" .block.autoscaling.minReplicas $there | int64 }}
{{- else -}}
{{ int64 .block.replicas }}
{{- end -}}
{{- end -}}

{{- define "baton.podSpec" -}}
{{- $block := .block -}}
serviceAccountName: {{ include "baton.serviceAccount" . | toYaml }}
automountServiceAccountToken: false
{{- /* Variables of services begin like settings' own: BATON_... */}}
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "baton.graceSeconds" . }}
securityContext:
  {{- include "baton.podSecurityContext" . | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ toYaml . }}
  {{- end }}
{{- end }}
{{- if $block.hostNetwork }}
hostNetwork: true
dnsPolicy: ClusterFirstWithHostNet
{{- end }}
{{- with $block.priorityClassName }}
priorityClassName: {{ toYaml . }}
{{- end }}
{{- with $block.runtimeClassName }}
runtimeClassName: {{ toYaml . }}
{{- end }}
{{- with $block.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $block.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $block.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- $selector := dict "matchLabels" (include "baton.selector" (dict "root" .root "component" .role "group" .group) | fromYaml) }}
{{- if or $block.spreadOverHosts $block.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- if $block.spreadOverHosts }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      {{- toYaml $selector | nindent 6 }}
  {{- end }}
  {{- range $block.topologySpreadConstraints }}
  - {{- toYaml (merge (deepCopy .) (dict "labelSelector" (ternary dict $selector (hasKey . "labelSelector")))) | nindent 4 }}
  {{- end }}
{{- end }}
{{- $init := include "baton.modelInit" (dict "root" .root "securityContext" (include "baton.initSecurityContext" .)) }}
{{- if or $init $block.extraInitContainers }}
initContainers:
  {{- $init | nindent 2 }}
  {{- with $block.extraInitContainers }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Image, settings and probes of the container. */}}
{{- define "baton.containerHead" -}}
name: {{ .role }}
{{ include "baton.image" (dict "root" .root "own" .block.image) }}
command: [{{ .command }}]
{{- end -}}

{{- define "baton.containerTail" -}}
securityContext:
  {{- include "baton.securityContext" . | nindent 2 }}
{{- range $probe := list "startupProbe" "livenessProbe" "readinessProbe" }}
{{- with index $.block $probe }}
{{ $probe }}:
  {{- /* A probe has one handler: another one than the default takes its place. */}}
  {{- toYaml (ternary . (omit . "httpGet") (empty (or .grpc .exec .tcpSocket))) | nindent 2 }}
{{- end }}
{{- end }}
{{- end -}}

{{/* Settings and model: mounts and volumes of all roles. */}}
{{- define "baton.mounts" -}}
- name: settings
  mountPath: /etc/baton
  readOnly: true
{{- include "baton.modelMounts" .root }}
{{- with .block.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "baton.volumes" -}}
- name: settings
  configMap:
    name: {{ include "baton.fullname" .root }}-{{ .workload }}
{{- include "baton.modelVolumes" .root }}
{{- include "baton.tokenVolume" .root }}
{{- with .block.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Bytes of a quantity of memory: 1Gi, 1.5G, 1073741824. */}}
{{- define "baton.bytes" -}}
{{- $units := dict "" 1.0 "m" 1e-3 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 -}}
{{- $binary := dict "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 -}}
{{- $unit := regexFind "[KMGTP]i$|[mkMGTP]$" (toString .) -}}
{{- mulf (trimSuffix $unit (toString .) | float64) (get (merge $units $binary) $unit) | printf "%.0f" -}}
{{- end -}}

{{/* Resources of a container of Baton or etcd. A limit of memory that is not set is the request, so that the process knows it; but 1 GiB, which any of them survives in. */}}
{{- define "baton.resources" -}}
{{- $resources := deepCopy (.resources | default dict) -}}
{{- $memory := dig "requests" "memory" "" $resources -}}
{{- if and $memory (not (dig "limits" "memory" "" $resources)) -}}
{{- if lt (include "baton.bytes" $memory | float64) 1073741824.0 -}}
{{- $memory = "1Gi" -}}
{{- end -}}
{{- $resources = mergeOverwrite $resources (dict "limits" (dict "memory" $memory)) -}}
{{- end -}}
{{ toYaml $resources }}
{{- end -}}

{{/* Rights and resources of a container of `helm test`: .Values.tests. */}}
{{- define "baton.testRights" -}}
securityContext:
  {{- toYaml .securityContext | nindent 2 }}
{{- with .resources }}
resources:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}
