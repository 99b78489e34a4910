{{/* Names and labels. A name has at most 28 characters: with role and group a StatefulSet's may have 52. */}}
{{- define "baton.fullname" -}}
{{- $chart := .Values.nameOverride | default .Chart.Name -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 28 | trimSuffix "-" -}}
{{- else if contains $chart .Release.Name -}}
{{- .Release.Name | trunc 28 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name $chart | trunc 28 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* What pods are selected by: (dict "root" $ "component" "prefill" "group" "default"), group optional. */}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: {{ .root.Values.nameOverride | default .root.Chart.Name | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with .group }}
baton/group: {{ . }}
{{- end }}
{{- end -}}

{{/* Labels of a resource; the same arguments. */}}
{{- define "baton.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{ include "baton.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Name and labels of a resource: (dict "root" $ "component" "conductor" "suffix" "operators"). */}}
{{- define "baton.metadata" -}}
name: {{ include "baton.fullname" .root }}{{ with .suffix }}-{{ . }}{{ end }}
namespace: {{ .root.Release.Namespace }}
labels:
  {{- include "baton.labels" . | nindent 2 }}
  {{- with .labels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- with .annotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* The groups of a role, name to values: the role's block, with what the group replaces. (dict "root" $ "role" "prefill") */}}
{{- define "baton.groups" -}}
{{- $block := index .root.Values .role -}}
{{- $base := omit $block "groups" -}}
{{- $all := dict -}}
{{- range $name, $own := $block.groups | default (dict "default" dict) -}}
{{- $_ := set $all $name (mergeOverwrite (deepCopy $base) (deepCopy ($own | default dict))) -}}
{{- end -}}
{{- toJson $all -}}
{{- end -}}

{{/* prefill, or prefill-GROUP. (dict "role" "prefill" "group" "default") */}}
{{- define "baton.workload" -}}
{{ .role }}{{ if ne .group "default" }}-{{ .group }}{{ end }}
{{- end -}}

{{- define "baton.serviceAccount" -}}
{{- $given := .block.serviceAccount -}}
{{- if $given.name -}}
{{ $given.name }}
{{- else if $given.create -}}
{{ include "baton.fullname" .root }}-{{ .role }}
{{- else -}}
default
{{- end -}}
{{- end -}}

{{/* An image: (dict "root" $ "own" .image). */}}
{{- define "baton.image" -}}
{{- $image := mergeOverwrite (deepCopy .root.Values.image) (deepCopy (.own | default dict)) -}}
{{- if $image.digest -}}
{{ $image.repository }}@{{ $image.digest }}
{{- else -}}
{{ $image.repository }}:{{ $image.tag | default .root.Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* Where nodes find the conductors. */}}
{{- define "baton.conductors" -}}
http://{{ include "baton.fullname" . }}-conductors.{{ .Release.Namespace }}.svc:{{ .Values.conductor.ports.nodes }}
{{- end -}}
