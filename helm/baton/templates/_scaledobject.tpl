{{/* Labels that this cluster's metrics are selected by. */}}
{{- define "baton.metricsSelector" -}}
namespace="{{ .Release.Namespace }}",baton_cluster="{{ include "baton.fullname" . }}"
{{- end -}}

{{/* One ScaledObject: root, role, group, block, workload, kind, triggers (a list of {query, threshold, type}). */}}
{{- define "baton.scaledObject" -}}
{{- $auto := .block.autoscaling -}}
apiVersion: keda.sh/v1alpha1
kind: ScaledObject
metadata:
  {{- include "baton.metadata" (dict "root" .root "component" .role "group" .group "suffix" .workload) | nindent 2 }}
spec:
  scaleTargetRef:
    apiVersion: apps/v1
    kind: {{ .kind }}
    name: {{ include "baton.fullname" .root }}-{{ .workload }}
  minReplicaCount: {{ int64 $auto.minReplicas }}
  maxReplicaCount: {{ int64 $auto.maxReplicas }}
  pollingInterval: {{ int64 $auto.pollingInterval }}
  advanced:
    horizontalPodAutoscalerConfig:
      behavior:
        scaleUp:
          stabilizationWindowSeconds: 0
          policies:
            - {type: Percent, value: 100, periodSeconds: 60}
        # A pod that goes drains first: SIGTERM, and up to its grace period.
        scaleDown:
          stabilizationWindowSeconds: {{ $auto.scaleDown.stabilizationSeconds }}
          policies:
            - {type: Pods, value: 1, periodSeconds: {{ $auto.scaleDown.periodSeconds }}}
  triggers:
    {{- range .triggers }}
    - type: prometheus
      metricType: {{ .type }}
      metadata:
        serverAddress: {{ $.root.Values.monitoring.prometheusAddress | quote }}
        {{- with $.root.Values.monitoring.authModes }}
        authModes: {{ . | quote }}
        {{- end }}
        query: {{ .query | squote }}
        threshold: {{ .threshold | toString | quote }}
      {{- with $.root.Values.monitoring.authenticationRef }}
      authenticationRef:
        {{- toYaml . | nindent 8 }}
      {{- end }}
    {{- end }}
{{- end -}}
