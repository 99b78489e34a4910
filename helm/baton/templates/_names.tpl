{{/*
Names and labels. A name has at most 28 characters: with role and group a StatefulSet's may have 52. A hash tells those
apart that are longer.
*/}}
{{- define "baton.fullname" -}}
{{- $chart := .Values.nameOverride | default .Chart.Name -}}
{{- $made := ternary .Release.Name (printf "%s-%s" .Release.Name $chart) (contains $chart .Release.Name) -}}
{{- $name := .Values.fullnameOverride | default $made -}}
{{- if gt (len $name) 28 -}}
{{ $name | trunc 21 | trimSuffix "-" }}-{{ sha256sum $name | trunc 6 }}
{{- else -}}
{{ $name }}
{{- end -}}
{{- end -}}

{{/* What pods are selected by: (dict "root" $ "component" "prefill" "group" "default"), group optional. */}}
{{- define "baton.selector" -}}
app.kubernetes.io/name: {{ .root.Values.nameOverride | default .root.Chart.Name | toYaml }}
app.kubernetes.io/instance: {{ .root.Release.Name | toYaml }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with .group }}
baton/group: {{ . | toYaml }}
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
namespace: {{ .root.Release.Namespace | toYaml }}
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
{{- $own = $own | default dict -}}
{{- $merged := mergeOverwrite (deepCopy $base) (deepCopy $own) -}}
{{- /* A volume has one source. */}}
{{- with dig "ssd" "volume" dict $own }}{{ $_ := set $merged.ssd "volume" . }}{{ end -}}
{{- $_ := set $merged "image" (include "baton.mergedImage" (dict "image" $base.image "own" $own.image) | fromJson) -}}
{{- $_ := set $all $name $merged -}}
{{- end -}}
{{- toJson $all -}}
{{- end -}}

{{/* prefill, or prefill-GROUP. (dict "role" "prefill" "group" "default") */}}
{{- define "baton.workload" -}}
{{ .role }}{{ if ne .group "default" }}-{{ .group }}{{ end }}
{{- end -}}

{{/* Where a group's values are: prefill, or prefill.groups.GROUP. The same arguments. */}}
{{- define "baton.path" -}}
{{ .role }}{{ if not (has .group (list "" "default")) }}.groups.{{ .group }}{{ end }}
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

{{/* An image's name, of {repository, tag, digest}. */}}
{{- define "baton.imageName" -}}
{{ .repository }}{{ if .digest }}@{{ .digest }}{{ else }}:{{ .tag }}{{ end }}
{{- end -}}

{{/* An image with what replaces parts of it; a new tag or repository does without the digest: (dict "image" .. "own" ..). */}}
{{- define "baton.mergedImage" -}}
{{- $own := .own | default dict -}}
{{- $image := mergeOverwrite (deepCopy (.image | default dict)) (deepCopy $own) -}}
{{- if and (or $own.tag $own.repository) (not $own.digest) }}{{ $_ := set $image "digest" "" }}{{ end -}}
{{- toJson $image -}}
{{- end -}}

{{/* Image of a container of Baton's: (dict "root" $ "own" .image). */}}
{{- define "baton.image" -}}
{{- $image := include "baton.mergedImage" (dict "image" .root.Values.image "own" .own) | fromJson -}}
{{- $_ := set $image "tag" ($image.tag | default .root.Chart.AppVersion) -}}
image: {{ include "baton.imageName" $image | toYaml }}
imagePullPolicy: {{ $image.pullPolicy }}
{{- end -}}

{{/* Where nodes find the conductors. */}}
{{- define "baton.conductors" -}}
http://{{ include "baton.fullname" . }}-conductors.{{ .Release.Namespace }}.svc:{{ .Values.conductor.ports.nodes }}
{{- end -}}
