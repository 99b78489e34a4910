{{/* A map of settings as TOML. Empty values are left out. */}}
{{- define "baton.toml" -}}
{{- range $key, $value := . }}
{{- if kindIs "invalid" $value }}
{{- else if kindIs "float64" $value }}
{{- if and (eq $value (floor $value)) (lt $value 9e18) }}
{{ $key }} = {{ int64 $value }}
{{- else }}
{{ $key }} = {{ $value }}
{{- end }}
{{- else }}
{{ $key }} = {{ toJson $value }}
{{- end }}
{{- end }}
{{- end -}}

{{/* The settings file of a role: the cluster's and its own. (dict "root" $ "block" VALUES) */}}
{{- define "baton.settings" -}}
{{- $settings := mergeOverwrite (deepCopy .root.Values.settings) (deepCopy (.block.settings | default dict)) -}}
{{- if dig "ssd" "enabled" false .block -}}
{{- $_ := set $settings "ssd_bytes" .block.ssd.bytes -}}
{{- end -}}
{{- include "baton.toml" $settings | trim -}}
{{- end -}}

{{/* Seconds that a drain may take: (dict "block" VALUES). */}}
{{- define "baton.drainSeconds" -}}
{{- $settings := .block.settings | default dict -}}
{{- addf ($settings.not_ready_s | default 0) (ternary 30 $settings.grace_s (kindIs "invalid" $settings.grace_s)) | ceil | int64 -}}
{{- end -}}

{{/* Seconds from SIGTERM to SIGKILL: the drain, the ten seconds in which a process closes, and ten to spare. */}}
{{- define "baton.graceSeconds" -}}
{{- $drain := include "baton.drainSeconds" . | int64 -}}
{{- if kindIs "invalid" .block.terminationGracePeriodSeconds -}}
{{ add $drain 20 }}
{{- else -}}
{{- $given := int64 .block.terminationGracePeriodSeconds -}}
{{- if le $given (add $drain 10) -}}
{{- $path := include "baton.path" . -}}
{{- fail (printf "%s.terminationGracePeriodSeconds: %d, but must exceed not_ready_s + grace_s + 10 s of closing, %d" $path $given (add $drain 10)) -}}
{{- end -}}
{{ $given }}
{{- end -}}
{{- end -}}

{{/* The objective of a role in milliseconds, or nothing: (dict "given" 5 "setting" "ttft_slo_ms" "root" $). */}}
{{- define "baton.objective" -}}
{{- if .given -}}
{{ .given }}
{{- else -}}
{{- $set := index (.root.Values.conductor.settings | default dict) .setting -}}
{{- if and $set (not (kindIs "string" $set)) -}}{{ $set }}{{- end -}}
{{- end -}}
{{- end -}}

{{- define "baton.etcdEndpoints" -}}
{{- if eq .Values.etcd.mode "external" -}}
{{ join "," .Values.etcd.external.endpoints }}
{{- else -}}
{{- $name := printf "%s-etcd" (include "baton.fullname" .) -}}
{{- $members := list -}}
{{- range $n := until (int .Values.etcd.bundled.replicas) -}}
{{- $members = append $members (printf "%s-%d.%s.%s.svc:2379" $name $n $name $.Release.Namespace) -}}
{{- end -}}
{{ join "," $members }}
{{- end -}}
{{- end -}}

{{- define "baton.etcdPrefix" -}}
{{ .Values.etcd.prefix | default (printf "/baton/%s/%s" .Release.Namespace (include "baton.fullname" .)) }}
{{- end -}}
